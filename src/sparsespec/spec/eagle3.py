"""EAGLE-3 (arXiv 2503.01840): a trained draft head of one layer reads the target's hidden states and drafts a chain.

Chain drafts, no tree: a batch that verifies everybody's drafts at once has no room for trees. The head's tokens are drawn
as the request samples, and its distribution is what verification knows them by. Each committed position is shown to
the head once (`absorb`), so that its KV cache is as long as the target's. Where the target did not compute a prefix (it
was cached), the head attends from the first position that it saw: drafts may be worse, the output is the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsespec.spec.base import DraftHead, DraftPolicy, Features, ProposeContext
from sparsespec.spec.head_cache import HeadCache

_PADDED_ROWS = 32  # items of more rows attend alone; shorter ones together, padded


class Eagle3(DraftPolicy):
    """`model` names the head. Kept for each slot: the head's KV up to `_end`, the drafts of this round that it ran through after
    that (`_ahead`; the sparse pass of a hierarchy buffers some), and its hidden state there."""

    name = "eagle3"
    proposes = True
    needs_head = True

    def bind(self, head: DraftHead) -> None:
        self.head, self.feature_layers = head, head.feature_layers
        self._cache: HeadCache | None = None

    def _ready(self, tokens: Tensor) -> HeadCache:
        """The cache, for the slots and lengths of the token table; made when the first row comes."""
        if self._cache is None:
            slots, length = tokens.shape
            head = self.head
            self._cache = HeadCache(slots, length, head.num_kv_heads, head.head_dim, head.dtype, head.device)
            self._end, self._ahead = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
            self._hidden = torch.zeros(slots, head.hidden_size, dtype=head.dtype, device=head.device)
        return self._cache

    def absorb(self, features: Features, tokens: Tensor) -> None:
        cache = self._ready(tokens)
        slots, positions = features.slots.cpu().numpy(), features.positions.cpu().numpy()
        begin = np.flatnonzero(np.diff(slots, prepend=-1))
        rows = np.diff(begin, append=len(slots))
        seen, start = slots[begin], positions[begin]
        fresh = start != self._end[seen]  # nothing known of what stands before
        for slot in seen[fresh].tolist():
            cache.release(slot)
        cache.first[seen[fresh]] = start[fresh]
        self._end[seen], self._ahead[seen] = start + rows, 0
        for slot, end in zip(seen.tolist(), (start + rows).tolist(), strict=True):
            cache.hold(slot, end)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(cache.entries(slots, positions), k, v)
            out = torch.empty_like(q)
            for items in _groups(rows):
                index = begin[items, None] + np.minimum(np.arange(rows[items].max()), rows[items, None] - 1)
                width = int((start + rows - cache.first[seen])[items].max())
                place = torch.from_numpy(positions[index] - cache.first[seen[items], None]).to(q.device)
                where = torch.from_numpy(index).to(q.device)
                out[where] = _attention(q[where], cache.read(seen[items], width), place)
            return out.flatten(1)

        after = tokens[features.slots, features.positions + 1]
        state = self.head(self.head.fuse(features.hidden), after, features.positions, attend)
        last = torch.from_numpy(begin + rows - 1).to(state.device)
        self._hidden[features.slots[last]] = state[last]

    def propose(self, context: ProposeContext) -> np.ndarray:
        cache, slots = self._ready(context.tokens), context.slots.astype(np.int64)
        known = self._end[slots] == context.lengths - 1
        most = np.where(known, np.maximum(context.most, 0), 0)
        part = np.flatnonzero(most)
        if len(part):
            self._run(cache, context, part, slots[part], most[part])
        return most.astype(np.int32)

    def _run(self, cache: HeadCache, context: ProposeContext, part: np.ndarray, slots: np.ndarray, most: np.ndarray) -> None:
        """Run through the drafts that others buffered, keep that, and then draw `most` [n] tokens, one a step."""
        buffered = np.maximum(context.drafted[part] - self._ahead[slots], 0)
        at = self._end[slots] + self._ahead[slots]  # position of the next state
        for slot, end in zip(slots.tolist(), (at + buffered).tolist(), strict=True):
            cache.hold(slot, end)
        chain = _Chain(self.head, cache, slots, at, int(buffered.max() + most.max()))
        slots_t, hidden = torch.from_numpy(slots).to(self.head.device), self._hidden[slots]
        for step in range(int(buffered.max())):
            token = context.tokens[slots_t, chain.positions(step) + 1]
            active = torch.from_numpy(step < buffered).to(hidden.device)
            hidden = torch.where(active[:, None], chain.step(hidden, token, step, np.flatnonzero(step < buffered)), hidden)
        self._ahead[slots] += buffered
        self._hidden[slots_t] = hidden
        none = np.zeros(0, np.int64)
        token = torch.zeros_like(slots_t)
        for place in range(int(most.max())):
            if place:
                hidden = chain.step(hidden, token, place - 1 + buffered, none)
            index = np.flatnonzero(most > place)
            token[index] = context.draw(self.head.logits(hidden[index]), part[index], place)

    # -- state of a request ------------------------------------------------------------------------------------------

    def leave(self, slot: int) -> None:
        if self._cache is not None:
            self._cache.release(slot)
            self._end[slot] = self._ahead[slot] = 0

    def take(self, slot: int) -> Any:
        if self._cache is None:
            return None
        first, end, ahead = int(self._cache.first[slot]), int(self._end[slot]), int(self._ahead[slot])
        kv = self._cache.read(np.array([slot]), end + ahead - first)[:, 0].clone()
        return first, end, ahead, kv, self._hidden[slot].clone()

    def give(self, slot: int, state: Any) -> None:
        if state is None or self._cache is None:
            return
        first, end, ahead, kv, hidden = state
        self._cache.release(slot)
        self._cache.first[slot], self._end[slot], self._ahead[slot], self._hidden[slot] = first, end, ahead, hidden
        self._cache.hold(slot, end + ahead)
        self._cache.write(self._cache.entries(np.array(slot), np.arange(first, end + ahead)), *kv.transpose(1, 2))


class _Chain:
    """The steps of one proposal: requests [n] together, over a copy of their KV with room for `steps` more."""

    def __init__(self, head: DraftHead, cache: HeadCache, slots: np.ndarray, at: np.ndarray, steps: int) -> None:
        self.head, self.cache, self.slots, self.at = head, cache, slots, at
        self.first = cache.first[slots]
        self.kv = cache.read(slots, int((at - self.first).max()) + steps)
        self._row = torch.arange(len(slots), device=head.device)

    def positions(self, step: int | np.ndarray) -> Tensor:
        """Positions [n] of the states of a step."""
        return torch.from_numpy(self.at + step).to(self.head.device)

    def step(self, hidden: Tensor, token: Tensor, step: int | np.ndarray, keep: np.ndarray) -> Tensor:
        """States [n, hidden] number `step` from those before and the tokens [n] after them; the KV of `keep` goes to the cache."""
        place = torch.from_numpy(self.at + step - self.first).to(self.head.device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.kv[0][self._row, :, place], self.kv[1][self._row, :, place] = k, v
            if len(keep):
                self.cache.write(self.cache.entries(self.slots[keep], (self.at + step)[keep]), k[keep], v[keep])
            return _attention(q[:, None], self.kv, place[:, None]).flatten(1)

        return self.head(hidden, token, self.positions(step), attend)


def _groups(rows: np.ndarray) -> list[np.ndarray]:
    """Items by how they attend: long ones alone, the short ones together."""
    short = np.flatnonzero(rows <= _PADDED_ROWS)
    return [*([short] if len(short) else []), *np.flatnonzero(rows > _PADDED_ROWS)[:, None]]


def _attention(q: Tensor, kv: Tensor, place: Tensor) -> Tensor:
    """q [n, R, heads, D] over kv [2, n, KV heads, L, D]; row r of item i sees the entries up to place [n, R]. Gives
    [n, R, heads, D]."""
    keys, values = kv
    n, rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    visible = torch.arange(keys.shape[2], device=q.device) <= place[:, :, None]
    mask = visible[:, None, None].expand(n, 1, heads // kv_heads, -1, -1).flatten(2, 3)
    folded = q.reshape(n, rows, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return out.view(n, kv_heads, -1, rows, dim).permute(0, 3, 1, 2, 4).reshape(n, rows, heads, dim)
