"""From logits to tokens: drafting on the sparse rows, and accepting on the full ones.

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
from sparsespec.verify.synthetic import synthetic


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
        self._draft_probs: Tensor | None = None
        self._shape = (slots, max_drafts, vocab_size)

    def seat(self, request: Request) -> None:
        """Bring a request's settings to its slot."""
        slot, params = request.slot, request.params
        self.table.set(slot, params, prompt_len=len(request.prompt_token_ids), seed=request.seed, coupled=request.coupled,
                       eos_token_ids=sorted(request.stop_ids), bad_word_ids=request.bad_word_ids, constraint=request.constraint)
        self.rejects[slot] = not params.greedy and not request.coupled
        self._seeds[slot] = request.seed

    def leave(self, slot: int) -> None:
        """Forget a slot's settings."""
        self.table.clear(slot)
        self.rejects[slot] = False

    def draft(self, logits: Tensor, rows: Rows, tokens: Tensor, drafted: np.ndarray, nonce: np.ndarray) -> Tensor:
        """Tokens [n] for the sparse rows. drafted [n]: drafts before each; nonce [n]: position of its round's first row."""
        dist = self.sampler.distribution(logits, rows, tokens)
        chosen: Tensor = self.sampler.sample_draft(dist, rows, torch.from_numpy(nonce.astype(np.int64)).to(self.device))
        slots = rows.slots.cpu().numpy() if self.device.type != "cpu" else rows.slots.numpy()
        keep = np.flatnonzero(self.rejects[slots])
        if len(keep) and dist.probs is not None:
            if self._draft_probs is None:
                self._draft_probs = torch.empty(self._shape, dtype=torch.float32, device=self.device)
            index = torch.from_numpy(keep).to(self.device)
            place = torch.from_numpy(drafted[keep]).to(self.device)
            self._draft_probs[rows.slots[index], place] = dist.probs[dist.index[index]]
        return chosen

    def force(self, slot: int, drafted: int, token: int) -> None:
        """The draft at this place was not drawn: its proposal is all on `token`."""
        if self._draft_probs is not None and self.rejects[slot]:
            self._draft_probs[slot, drafted] = 0.0
            self._draft_probs[slot, drafted, token] = 1.0

    def verify(self, logits: Tensor, rows: Rows, tokens: Tensor, slots: np.ndarray, drafted: np.ndarray, first: np.ndarray,
               place: np.ndarray) -> Verdict:
        """Accept drafts of B items. slots, drafted [B]; first [B]: an item's first row; place [B]: position of its first new token.

        Writes the emitted tokens to `tokens` as well, so that the next step's rows find them on the device.
        """
        width = int(drafted.max()) + 1
        column = np.arange(width)
        index = torch.from_numpy(first[:, None] + np.minimum(column, drafted[:, None])).to(self.device)
        dist = self.sampler.distribution(logits, rows, tokens)
        slot_t = torch.from_numpy(slots.astype(np.int64)).to(self.device)
        count_t = torch.from_numpy(drafted).to(self.device)
        place_t = torch.from_numpy(place.astype(np.int64)).to(self.device)[:, None] + torch.arange(width, device=self.device)
        drafts = tokens[slot_t[:, None], place_t[:, :width - 1]]
        out = torch.zeros(len(slots), width, dtype=torch.int64, device=self.device)
        emitted = torch.ones(len(slots), dtype=torch.int64, device=self.device)
        rejects = self.rejects[slots]
        if self.synthetic_acceptance is not None:
            rejects = np.zeros_like(rejects)
        for mask, by_rejection in ((~rejects, False), (rejects, True)):
            part = np.flatnonzero(mask)
            if not len(part):
                continue
            sel = torch.from_numpy(part).to(self.device)
            result = (self._reject if by_rejection else self._match)(dist, rows, index[sel], drafts[sel], count_t[sel],
                                                                    slot_t[sel], place_t[sel])
            out[sel], emitted[sel] = result
        tokens[slot_t[:, None], place_t] = out
        # Only rows that plain decoding would have computed count: what stands behind a rejected draft is nobody's.
        broken = dist.bad[index] & (torch.arange(width, device=self.device) <= count_t[:, None])
        first_bad = torch.where(broken.any(1), broken.int().argmax(1), width)
        bad = first_bad < emitted
        return Verdict(out, torch.where(bad, first_bad, emitted), bad)

    def _match(self, dist: Distribution, rows: Rows, index: Tensor, drafts: Tensor, count: Tensor, slots: Tensor,
               place: Tensor) -> tuple[Tensor, Tensor]:
        target = self.sampler.sample_target_tokens(dist, rows)[index]
        if self.synthetic_acceptance is not None:
            seeds = self._seeds[slots][:, None].expand_as(drafts).reshape(-1)
            u = rng.uniform(seeds, place[:, :-1].reshape(-1), 0, rng.ACCEPT).view(drafts.shape)
            result = synthetic(drafts, count, target, u, self.synthetic_acceptance)
        else:
            result = match(drafts, count, target)
        return result.tokens, result.num_emitted

    def _reject(self, dist: Distribution, rows: Rows, index: Tensor, drafts: Tensor, count: Tensor, slots: Tensor,
                place: Tensor) -> tuple[Tensor, Tensor]:
        if dist.probs is None:
            raise RuntimeError("sampled requests without probabilities")
        width = index.shape[1]
        nonce = place[:, :1] - 1
        seeds = self._seeds[slots][:, None].expand(-1, width).reshape(-1)
        nonces = nonce.expand(-1, width).reshape(-1)
        accept, residual, bonus = (rng.uniform(seeds, place.reshape(-1), nonces, stream).view(-1, width)
                                   for stream in (rng.ACCEPT, rng.RESIDUAL, rng.TARGET))
        proposals = self._draft_probs[slots, :width - 1] if self._draft_probs is not None else None
        last = bonus.gather(1, count[:, None]).squeeze(1)
        result = rejection(drafts, count, dist.probs[dist.index[index]], proposals, accept[:, :-1], residual[:, :-1], last)
        return result.tokens, result.num_emitted
