"""Ending a draft early: a request verifies once the chance that all its drafts hold has fallen too low to go on.

The draft's own probability of what it chose says how likely the target is to agree, but not by how much: a running
calibration turns it into a chance (the idea of SpecKV, arXiv 2605.02888, and SparseSpec-L, arXiv 2607.27735). One more
draft is worth the chance that everything up to it is accepted, and costs a draft pass and a row of the verification.
"""

from __future__ import annotations

import numpy as np

from sparsespec.core.plan import StepPlan, StepResult

_BINS = 20
_PRIOR_WEIGHT = 4.0
_MEMORY = 512.0  # drafts that a bin remembers
_SMOOTH = 0.02  # weight of a round in the running means


class Calibration:
    """Chance that a draft is accepted, given those before it, by the probability that the draft gave it."""

    def __init__(self) -> None:
        centers = (np.arange(_BINS) + 0.5) / _BINS
        self._tried = np.full(_BINS, _PRIOR_WEIGHT)
        self._taken = _PRIOR_WEIGHT * centers

    def bin(self, confidence: np.ndarray) -> np.ndarray:
        """Bin [n] of probabilities [n]."""
        return np.clip((confidence * _BINS).astype(np.int64), 0, _BINS - 1)

    def chance(self, bins: np.ndarray) -> np.ndarray:
        """Chance of acceptance [n] of drafts in bins [n]."""
        return self._taken[bins] / self._tried[bins]

    def learn(self, bins: np.ndarray, accepted: np.ndarray) -> None:
        """What became of drafts [n] in bins [n]."""
        np.add.at(self._tried, bins, 1.0)
        np.add.at(self._taken, bins, accepted.astype(float))
        over = self._tried > _MEMORY
        self._taken[over] *= _MEMORY / self._tried[over]
        self._tried[over] = _MEMORY


class EarlyStop:
    """Which requests stop drafting after a step.

    cost: of a draft pass, relative to a verification's. With c this cost, and rounds that lately took d drafts to give t
    tokens, time buys t / (d c + 1) tokens a verification's worth; a draft goes on while the next one would buy more.
    """

    def __init__(self, slots: int, most: int, cost: float) -> None:
        self.cost, self.calibration = cost, Calibration()
        self._bins = np.zeros((slots, most + 1), np.int64)
        self._chance = np.ones(slots)  # that all that a request drafted holds
        self._drafts, self._tokens = float(most), 0.75 * most + 1  # means of recent rounds
        self._next = 0.75  # chance of a draft whose probability is not yet known

    @property
    def least(self) -> float:
        """Chance that all drafts so far hold, under which one more does not pay."""
        return self.cost * self._tokens / (self._drafts * self.cost + 1) / self._next

    def drafted(self, plan: StepPlan, result: StepResult) -> np.ndarray:
        """Slots that stop now, of those whose draft this step extended by one token."""
        if result.confidence is None:
            return np.zeros(0, np.int32)
        slots, place = plan.slots[:plan.num_sparse], plan.drafted[:plan.num_sparse]
        bins = self.calibration.bin(result.confidence)
        self._bins[slots, place] = bins
        self._chance[slots] = np.where(place > 0, self._chance[slots], 1.0) * self.calibration.chance(bins)
        stop: np.ndarray = slots[self._chance[slots] < self.least]
        return stop

    def verified(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from verified rounds."""
        slots, drafted, accepted = plan.slots[result.items], plan.drafted[result.items], result.num_tokens - 1
        for slot, d, a in zip(slots.tolist(), drafted.tolist(), accepted.tolist(), strict=True):
            if not d:
                continue
            reached = min(d, a + 1)
            held = np.arange(reached) < a
            self.calibration.learn(self._bins[slot, :reached], held)
            self._drafts += _SMOOTH * (d - self._drafts)
            self._tokens += _SMOOTH * (a + 1 - self._tokens)
            self._next += _SMOOTH / d * float((held - self._next).sum())
