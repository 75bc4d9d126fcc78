"""From logits to tokens: drafting on the sparse rows, and accepting on the full ones.

Acceptance has up to two levels. The sparse pass checks what a cheap proposer gave, as the full pass checks what the sparse
one buffered; both are exact with respect to the pass that checks.

Requests are verified in one of two ways, known when they are seated. Greedy requests, and those with a seed of their
own, have a token that the target would choose at each position whatever was drafted: drafts are accepted while they
match it. All others go through rejection sampling, which accepts more and keeps the target's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsespec.core.request import Request
from sparsespec.sampling import rng
from sparsespec.sampling.sampler import Distribution, Rows, Sampler
from sparsespec.sampling.table import SamplingTable
from sparsespec.verify.greedy import match
from sparsespec.verify.rejection import rejection
from sparsespec.verify.result import VerifyResult
from sparsespec.verify.synthetic import synthetic

Level = tuple[int, int, int]
"""Streams of random numbers of one level of acceptance: to accept, for the residual, for the token after the last draft."""

_TARGET: Level = (rng.ACCEPT, rng.RESIDUAL, rng.TARGET)
_MIDDLE: Level = (rng.CHECK, rng.CHECK_RESIDUAL, rng.DRAFT)


@dataclass(frozen=True)
class DraftItems:
    """Sparse items [n]: slots, drafts buffered before each, proposals to check, and position of their round's first row."""

    slots: np.ndarray
    drafted: np.ndarray
    proposed: np.ndarray
    nonce: np.ndarray

    @property
    def place(self) -> np.ndarray:
        """Position of each item's first new token."""
        return self.nonce + 1 + self.drafted


@dataclass(frozen=True)
class Verdict:
    """tokens [B, K+1], num_emitted [B], bad [B]: see StepResult."""

    tokens: Tensor
    num_emitted: Tensor
    bad: Tensor


class Decider:
    """See the module. Draft distributions are kept for requests under rejection sampling alone: [slots, K, vocab]."""

    def __init__(self, slots: int, vocab_size: int, max_drafts: int, device: torch.device,
                 synthetic_acceptance: float | None) -> None:
        self.table = SamplingTable(slots, vocab_size, device)
        self.sampler = Sampler(self.table)
        self.max_drafts, self.device, self.synthetic_acceptance = max_drafts, device, synthetic_acceptance
        self.rejects = np.zeros(slots, bool)
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.wants_confidence = False
        self.confidence: Tensor | None = None
        self._draft_probs: Tensor | None = None
        self._shape = (slots, max_drafts, vocab_size)

    def seat(self, request: Request, slot: int) -> None:
        """Bring a request's settings to its slot."""
        params = request.params
        self.table.set(slot, params, prompt_len=len(request.prompt_token_ids), seed=request.seed, coupled=request.coupled,
                       eos_token_ids=sorted(request.stop_ids), bad_word_ids=request.bad_word_ids, constraint=request.constraint)
        self.rejects[slot] = not params.greedy and not request.coupled
        self._seeds[slot] = request.seed

    def leave(self, slot: int) -> None:
        """Forget a slot's settings."""
        self.table.clear(slot)
        self.rejects[slot] = False

    def draft(self, logits: Tensor, rows: Rows, tokens: Tensor, items: DraftItems) -> Tensor:
        """Buffer tokens of the sparse items, whose rows these are: what they confirm of the proposals, and one more.

        Writes them to `tokens` and gives how many each item buffered [n]. Where a request is under rejection sampling, the
        buffered tokens are distributed as the sparse pass has it, and that distribution is kept for the verification.
        """
        dist = self.sampler.distribution(logits, rows, tokens)
        nonce = np.repeat(items.nonce, items.proposed + 1)
        own: Tensor = self.sampler.sample_draft(dist, rows, self._to(nonce))
        if items.proposed.any():
            return self._check(dist, rows, own, tokens, items)
        tokens[rows.slots, rows.positions] = own
        keep = np.flatnonzero(self.rejects[items.slots])
        if len(keep) and dist.probs is not None:
            index = self._to(keep)
            self._proposals()[rows.slots[index], self._to(items.drafted[keep])] = dist.probs[dist.index[index]]
        self._remember(dist, own)
        return torch.ones(len(items.slots), dtype=torch.int64, device=self.device)

    def propose(self, logits: Tensor, rows: Rows, tokens: Tensor, place: np.ndarray, nonce: np.ndarray) -> Tensor:
        """Tokens [n] that a proposer's own model draws, as drafts number `place` [n] of their rounds; written to `tokens`."""
        dist = self.sampler.distribution(logits, rows, tokens)
        drawn: Tensor = self.sampler.sample_draft(dist, rows, self._to(nonce), rng.PROPOSE)
        tokens[rows.slots, rows.positions] = drawn
        keep = np.flatnonzero(self.rejects[rows.slots.cpu().numpy()])
        if len(keep) and dist.probs is not None:
            index = self._to(keep)
            self._proposals()[rows.slots[index], self._to(place[keep])] = dist.probs[dist.index[index]]
        return drawn

    def _check(self, dist: Distribution, rows: Rows, own: Tensor, tokens: Tensor, items: DraftItems) -> Tensor:
        """The middle level: proposals are accepted or replaced exactly as a verification would, with the sparse pass as target."""
        first = np.cumsum(items.proposed + 1) - items.proposed - 1
        out, emitted, index = self._decide(dist, rows, own, tokens, items.slots, items.proposed, first, items.place, items.nonce,
                                           items.drafted, _MIDDLE)
        keep = np.flatnonzero(self.rejects[items.slots])
        if len(keep) and dist.probs is not None:
            sel = self._to(keep)
            column = torch.arange(index.shape[1], device=self.device)
            place = (self._to(items.drafted[keep])[:, None] + column).clamp(max=self.max_drafts - 1)
            used = column < emitted[sel][:, None]
            slots = self._to(items.slots[keep])[:, None].expand_as(place)
            self._proposals()[slots[used], place[used]] = dist.probs[dist.index[index[sel][used]]]
        last = index.gather(1, emitted[:, None] - 1).squeeze(1)
        self._remember(dist, out.gather(1, emitted[:, None] - 1).squeeze(1), last)
        return emitted

    def _remember(self, dist: Distribution, chosen: Tensor, index: Tensor | None = None) -> None:
        """Keep the draft's own probability of what it chose, if somebody asks for it."""
        self.confidence = dist.probability(chosen, index) if self.wants_confidence else None

    def _proposals(self) -> Tensor:
        """Distributions that drafts were drawn from [slots, K, vocab]."""
        if self._draft_probs is None:
            self._draft_probs = torch.empty(self._shape, dtype=torch.float32, device=self.device)
        return self._draft_probs

    def _to(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

    def force(self, slot: int, place: int, ids: list[int]) -> None:
        """The drafts from `place` on were not drawn: each proposal is all on its token."""
        if self.rejects[slot]:
            probs = self._proposals()[slot, place:place + len(ids)]
            probs.zero_()
            probs[torch.arange(len(ids)), torch.tensor(ids)] = 1.0

    def verify(self, logits: Tensor, rows: Rows, tokens: Tensor, slots: np.ndarray, drafted: np.ndarray, first: np.ndarray,
               place: np.ndarray) -> Verdict:
        """Accept drafts of B items. slots, drafted [B]; first [B]: an item's first row; place [B]: position of its first new token.

        Writes the emitted tokens to `tokens` as well, so that the next step's rows find them on the device.
        """
        dist = self.sampler.distribution(logits, rows, tokens)
        own = self.sampler.sample_target_tokens(dist, rows)
        out, emitted, index = self._decide(dist, rows, own, tokens, slots, drafted, first, place, place - 1,
                                           np.zeros_like(drafted), _TARGET)
        # Only rows that plain decoding would have computed count: what stands behind a rejected draft is nobody's.
        column = torch.arange(index.shape[1], device=self.device)
        broken = dist.bad[index] & (column <= self._to(drafted)[:, None])
        first_bad = torch.where(broken.any(1), broken.int().argmax(1), index.shape[1])
        bad = first_bad < emitted
        return Verdict(out, torch.where(bad, first_bad, emitted), bad)

    def _decide(self, dist: Distribution, rows: Rows, own: Tensor, tokens: Tensor, slots: np.ndarray, drafted: np.ndarray,
                first: np.ndarray, place: np.ndarray, nonce: np.ndarray, offset: np.ndarray,
                level: Level) -> tuple[Tensor, Tensor, Tensor]:
        """Accept `drafted` [B] tokens of each item from position `place` [B] on: (tokens [B, width], emitted [B], row index).

        own: the token of each row where it is known beforehand. offset [B]: the drafts' first place among the kept proposals.
        """
        width = int(drafted.max()) + 1
        index = self._to(first[:, None] + np.minimum(np.arange(width), drafted[:, None]))
        slot_t, count_t = self._to(slots), self._to(drafted)
        place_t = self._to(place)[:, None] + torch.arange(width, device=self.device)
        drafts = tokens[slot_t[:, None], place_t[:, :width - 1]]
        out = torch.zeros(len(slots), width, dtype=torch.int64, device=self.device)
        emitted = torch.ones(len(slots), dtype=torch.int64, device=self.device)
        by_chance = self.synthetic_acceptance is not None and level is _TARGET
        rejects = np.zeros(len(slots), bool) if by_chance else self.rejects[slots]
        for mask, by_rejection in ((~rejects, False), (rejects, True)):
            part = np.flatnonzero(mask)
            if not len(part):
                continue
            sel = self._to(part)
            if by_rejection:
                result = self._reject(dist, index[sel], drafts[sel], count_t[sel], slot_t[sel], place_t[sel], self._to(nonce[part]),
                                      self._to(offset[part]), level)
            elif by_chance:
                result = self._by_chance(own[index[sel]], drafts[sel], count_t[sel], slot_t[sel], place_t[sel])
            else:
                result = match(drafts[sel], count_t[sel], own[index[sel]])
            out[sel], emitted[sel] = result.tokens, result.num_emitted
        tokens[slot_t[:, None], place_t] = out
        return out, emitted, index

    def _by_chance(self, target: Tensor, drafts: Tensor, count: Tensor, slots: Tensor, place: Tensor) -> VerifyResult:
        seeds = self._seeds[slots][:, None].expand_as(drafts).reshape(-1)
        u = rng.uniform(seeds, place[:, :-1].reshape(-1), 0, rng.ACCEPT).view(drafts.shape)
        return synthetic(drafts, count, target, u, self.synthetic_acceptance or 0.0)

    def _reject(self, dist: Distribution, index: Tensor, drafts: Tensor, count: Tensor, slots: Tensor, place: Tensor,
                nonce: Tensor, offset: Tensor, level: Level) -> VerifyResult:
        if dist.probs is None:
            raise RuntimeError("sampled requests without probabilities")
        width = index.shape[1]
        seeds = self._seeds[slots][:, None].expand(-1, width).reshape(-1)
        nonces = nonce[:, None].expand(-1, width).reshape(-1)
        accept, residual, bonus = (rng.uniform(seeds, place.reshape(-1), nonces, stream).view(-1, width) for stream in level)
        proposals = None
        if width > 1:
            held = (offset[:, None] + torch.arange(width - 1, device=self.device)).clamp(max=self.max_drafts - 1)
            proposals = self._proposals()[slots[:, None], held]
        last = bonus.gather(1, count[:, None]).squeeze(1)
        return rejection(drafts, count, dist.probs[dist.index[index]], proposals, accept[:, :-1], residual[:, :-1], last)
