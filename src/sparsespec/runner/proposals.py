"""Drafts that no pass of the target made: a proposer's tokens, and those that a test puts in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsespec.core.request import Request
from sparsespec.runner.decide import Decider, DraftItems
from sparsespec.sampling.sampler import Rows
from sparsespec.spec.base import ProposeContext
from sparsespec.spec.registry import PolicySet

DraftOverride = Callable[[str, int], int | None]
"""(request id, position) → the token to draft there, or None for the policy's own."""


class Proposals:
    """Writes to the token table, and tells the decider what each token was drawn from."""

    def __init__(self, policies: PolicySet, decider: Decider, tokens: Tensor) -> None:
        self.policies, self.decider, self.tokens = policies, decider, tokens
        self.override: DraftOverride | None = None

    def fill(self, requests: Sequence[Request | None], slots: np.ndarray, lengths: np.ndarray, drafted: np.ndarray,
             most: np.ndarray) -> np.ndarray:
        """Proposals for `slots` [n], after `lengths` committed and `drafted` buffered tokens: how many each got [n]."""
        counts = np.zeros(len(slots), np.int32)
        seated = [r for r in requests if r is not None]
        owners = np.array([r.traits.policy for r in seated])
        for policy in np.unique(owners).tolist():
            part = np.flatnonzero(owners == policy)
            chosen = [seated[i] for i in part]
            start = lengths[part] + drafted[part]

            def draw(logits: Tensor, index: np.ndarray, place: int, part: np.ndarray = part, start: np.ndarray = start) -> Tensor:
                at = part[index]
                rows = Rows(self._to(slots[at]), self._to(start[index] + place))
                return self.decider.propose(logits, rows, self.tokens, drafted[at] + place, lengths[at] - 1)

            context = ProposeContext(chosen, slots[part], lengths[part], drafted[part], most[part], self.tokens, draw)
            found = self.policies[policy].propose(context)
            if isinstance(found, np.ndarray):
                counts[part] = found
            else:
                for i, ids in zip(part.tolist(), found, strict=True):
                    counts[i] = len(ids)
                    self._put(int(slots[i]), int(lengths[i]), int(drafted[i]), ids)
        if self.override is not None:
            self._override_proposals(seated, slots, lengths, drafted, counts)
        return counts

    def override_drafts(self, requests: Sequence[Request | None], items: DraftItems) -> None:
        """Replace what sparse items of a single row drafted where the override asks for it."""
        for request, slot, drafted, proposed, nonce in zip(requests, items.slots, items.drafted, items.proposed, items.nonce,
                                                           strict=True):
            if request is None or proposed or self.override is None:
                continue
            forced = self.override(request.request_id, int(nonce) + 1 + int(drafted))
            if forced is not None:
                self._put(int(slot), int(nonce) + 1, int(drafted), [forced])

    def _override_proposals(self, requests: Sequence[Request], slots: np.ndarray, lengths: np.ndarray, drafted: np.ndarray,
                            counts: np.ndarray) -> None:
        for i, request in enumerate(requests):
            for place in range(int(counts[i])):
                position = int(lengths[i] + drafted[i]) + place
                forced = self.override(request.request_id, position) if self.override is not None else None
                if forced is not None:
                    self._put(int(slots[i]), int(lengths[i]), int(drafted[i]) + place, [forced])

    def _put(self, slot: int, length: int, place: int, ids: list[int]) -> None:
        """Tokens that were not drawn, as drafts number `place` and on of the round that began at `length`."""
        if ids:
            self.tokens[slot, length + place:length + place + len(ids)] = torch.tensor(ids, device=self.tokens.device)
            self.decider.force(slot, place, ids)

    def _to(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.tokens.device)
