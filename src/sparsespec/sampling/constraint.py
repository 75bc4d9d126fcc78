"""Follows constraints through the tokens of their requests, drafts included, and says what may come next.

State is a function of a row's history alone: for a row at (slot, position) it is brought to stand after the tokens before
that position, back to where they differ from those it knows and forward from there. So drafts and verification see the
same masks, and what a rejected draft left behind is gone without anybody saying so. Where a draft breaks the rules (only
one that was not drawn under them can), rows after it are left unmasked: they will be rejected with it.

Three stages: reasoning, up to and including the marker; the grammar; the end, when only EOS may come. Reasoning can not
end the output if a grammar is to follow, nor can a token with the marker's end in it go on against the grammar.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsespec.sampling.grammar import Constraint, match_marker

_GRAMMAR, _ENDED, _FREE = -1, -2, -3
"""Stages. 0 or more: reasoning, with that many bytes of the marker matched. _FREE: nothing is asked any more."""


def words(vocab_size: int) -> int:
    """int32 words of a bit mask over the vocabulary."""
    return -(-vocab_size // 32)


def unpack(bits: Tensor, vocab_size: int) -> Tensor:
    """bool [R, V] of bit masks int32 [R, W]: bit b of word w is token 32 w + b."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(torch.uint8)[:, :, None] >> shifts).bitwise_and_(1).view(len(bits), -1)[:, :vocab_size].to(torch.bool)


def _set_bits(mask: Tensor, ids: Collection[int], on: bool) -> None:
    """Switch ids in one bit mask int32 [W]."""
    array = mask.numpy().view(np.uint32)
    for token in ids:
        bit = np.uint32(1 << token % 32)
        array[token // 32] = array[token // 32] | bit if on else array[token // 32] & ~bit


class Follower:
    """One slot's constraint, and how far its output is known. Counts of tokens are from the end of the prompt."""

    def __init__(self, constraint: Constraint, prompt_len: int, end_ids: Collection[int]) -> None:
        self.constraint, self.prompt_len = constraint, prompt_len
        self.end_ids = frozenset(end_ids)
        self.settled = 0  # the tokens before it can no longer change
        self.matcher = self._matcher()
        self._tokens: list[int] = []
        self._stages = [0 if constraint.marker else _GRAMMAR if self.matcher else _FREE]  # after 0, 1, ... tokens
        self._steps = [0]  # of the matcher, likewise
        self._masks: dict[int, Tensor] = {}

    def _matcher(self) -> Any:
        if self.constraint.grammar is None:
            return None
        import xgrammar

        return xgrammar.GrammarMatcher(self.constraint.grammar, override_stop_tokens=sorted(self.end_ids))

    def move(self, start: int, tokens: list[int]) -> None:
        """Stand after the first `start` tokens, which are known, and `tokens` after them."""
        known = self._tokens[start:start + len(tokens)]
        same = next((i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b), len(known))
        self._rewind(start + same)
        for token in tokens[same:]:
            self._accept(token)

    def mask(self, out: Tensor) -> bool:
        """Write what may come next to a bit mask int32 [W]; False, and nothing written, if all may."""
        stage = self._stages[-1]
        if stage == _FREE:
            return False
        if stage == _GRAMMAR:
            self.matcher.fill_next_token_bitmask(out[None])
        elif stage == _ENDED:
            out.zero_()
            _set_bits(out, self.end_ids, True)
        elif (forced := self._forced()) is not None:
            out.zero_()
            _set_bits(out, [forced], True)
        elif self.matcher is None:
            return False
        else:
            out.copy_(self._reasoning_mask(stage))
        return True

    def _rewind(self, count: int) -> None:
        steps = self._steps[-1] - self._steps[count]
        if steps:
            self.matcher.rollback(steps)
        del self._tokens[count:], self._stages[count + 1:], self._steps[count + 1:]

    def _accept(self, token: int) -> None:
        stage, steps = self._stages[-1], self._steps[-1]
        if stage >= 0:
            stage, fed = self._reason(stage, token)
            steps += fed
        elif stage == _GRAMMAR:
            if self.matcher.accept_token(token):
                steps += 1
                stage = _ENDED if self.matcher.is_terminated() else _GRAMMAR
            else:
                stage = _FREE
        elif stage == _ENDED and token not in self.end_ids:
            stage = _FREE
        self._tokens.append(token)
        self._stages.append(stage)
        self._steps.append(steps)

    def _reason(self, matched: int, token: int) -> tuple[int, int]:
        """(next stage, steps of the matcher) of a token of reasoning."""
        marker, forced = self.constraint.marker, self._forced()
        if marker is None or (forced is not None and token != forced) or (self.matcher and token in self.end_ids):
            return _FREE, 0
        matched, rest = match_marker(marker.text, matched, self.constraint.vocabulary.texts[token])
        if rest is None:
            return matched, 0
        if self.matcher is None:
            return _FREE, 0
        if not rest:
            return _GRAMMAR, 0
        return (_GRAMMAR, 1) if self.matcher.accept_string(rest) else (_FREE, 0)

    def _forced(self) -> int | None:
        """The marker's token that has to come now, since the budget is spent."""
        c, count = self.constraint, len(self._tokens)
        if c.budget is None or c.marker is None or not 0 <= count - c.budget < len(c.marker.ids):
            return None
        return c.marker.ids[count - c.budget]

    def _reasoning_mask(self, matched: int) -> Tensor:
        """All but what would end the output, or end reasoning with text that the grammar does not begin with."""
        if matched not in self._masks:
            mask = torch.full((words(self.constraint.vocabulary.size),), -1, dtype=torch.int32)
            wrong = set(self.end_ids)
            for token, rest in self.constraint.marker.endings[matched] if self.constraint.marker else ():
                if self.matcher.accept_string(rest):
                    self.matcher.rollback(1)
                else:
                    wrong.add(token)
            _set_bits(mask, wrong, False)
            self._masks[matched] = mask
        return self._masks[matched]


class Constraints:
    """The followers of all slots that have one."""

    def __init__(self) -> None:
        self._slots: dict[int, Follower] = {}

    def seat(self, slot: int, constraint: Constraint, prompt_len: int, end_ids: Collection[int]) -> None:
        """end_ids: what may end the output where the grammar allows it."""
        self._slots[slot] = Follower(constraint, prompt_len, end_ids)

    def clear(self, slot: int) -> None:
        """Forget a slot's constraint, if it has one."""
        self._slots.pop(slot, None)

    def masks(self, slots: Tensor, positions: Tensor, tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor] | None:
        """(indices int64 [R], bit masks int32 [R, W]) of the rows that something is asked of; None if there are none.

        slots, positions [N] as in Rows, tokens int64 [max_num_seqs, max_len]. Between two calls, tokens may change only at
        the lowest position of the first and after it.
        """
        where, places = slots.cpu().numpy(), positions.cpu().numpy()
        asked = [(slot, rows[np.argsort(places[rows], kind="stable")]) for slot, follower in self._slots.items()
                 if len(rows := np.flatnonzero((where == slot) & (places >= follower.prompt_len)))]  # the prompt is not ours
        if not asked:
            return None
        histories = self._histories(asked, places, tokens)
        bits = torch.full((len(where), words(vocab_size)), -1, dtype=torch.int32)
        index: list[int] = []
        for (slot, rows), history in zip(asked, histories, strict=True):
            follower = self._slots[slot]
            counts = (places[rows] - follower.prompt_len).tolist()
            start = min(follower.settled, counts[0])
            for row, count in zip(rows.tolist(), counts, strict=True):
                follower.move(start, history[:count - start])
                if follower.mask(bits[row]):
                    index.append(row)
            follower.settled = counts[0]
        if not index:
            return None
        found = torch.tensor(index)
        return found.to(slots.device), bits[found].to(slots.device)

    def _histories(self, asked: list[tuple[int, np.ndarray]], places: np.ndarray, tokens: Tensor) -> list[list[int]]:
        """Of each slot the tokens from where they may have changed up to its last row, in one transfer."""
        followers = [self._slots[slot] for slot, _ in asked]
        first = np.array([f.prompt_len + min(f.settled, places[rows[0]] - f.prompt_len)
                          for f, (_, rows) in zip(followers, asked, strict=True)])
        last = np.array([places[rows[-1]] for _, rows in asked])
        column = np.minimum(first[:, None] + np.arange(max(int((last - first).max()), 1)), tokens.shape[1] - 1)
        index = torch.from_numpy(np.stack([np.broadcast_to(np.array([[slot] for slot, _ in asked]), column.shape), column]))
        index = index.to(tokens.device)
        return [row[:n] for row, n in zip(tokens[index[0], index[1]].tolist(), (last - first).tolist(), strict=True)]
