"""How many drafts a round makes: fixed, or chosen from measured costs and acceptance so that drafting never loses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sparsespec.core.plan import StepPlan
from sparsespec.spec.base import DraftPolicy
from sparsespec.spec.cost import StepCosts, expected_tokens, gain

_PRIOR, _PRIOR_WEIGHT = 0.85, 4.0  # acceptance before anything was seen, worth this many rounds
_MEMORY = 256.0  # rounds that an estimate remembers
_ON, _KEEP = 1.08, 1.02  # predicted gain that starts drafting, and that keeps it
_BETTER = 1.03  # another k must gain this much over the present one
_CHOICES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
_PROBE_AFTER = 1024  # plain iterations before drafting is tried again; doubles with each failure
_SMOOTH = 0.1  # least weight of a new measurement in the running ratio of measured to predicted time
_WARM = 8  # plain iterations that are measured before drafting is considered: they cost nothing
_SETTLE = 12  # drafting iterations before the choice is looked at again


class FixedLength:
    """k as configured."""

    def __init__(self, k: int) -> None:
        self.k = k

    def draft_length(self) -> int:
        """k for rounds that begin now; 0 decodes plainly."""
        return self.k

    def prepare(self, plan: StepPlan) -> None:
        """See what the next step carries, before it runs."""

    def observe(self, plan: StepPlan, rounds: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learn from a step: (drafted, accepted) of each verification, and its time."""


class AdaptiveLength(FixedLength):
    """Chooses k, or none, as batch, context and acceptance change.

    Costs come from a short measurement and are corrected by the ratio of measured to predicted step times, for plain
    and drafting iterations apart. It begins plainly, which shows what there is to beat.
    """

    def __init__(self, policy: DraftPolicy, measure: Callable[[], StepCosts]) -> None:
        super().__init__(0)
        self.most, self.policy, self._measure = policy.config.num_speculative_tokens, policy, measure
        self.choices = sorted({c for c in _CHOICES if c < self.most} | {self.most})
        self._costs: StepCosts | None = None
        self._tried = np.full(self.most, _PRIOR_WEIGHT)
        self._taken = np.full(self.most, _PRIOR_WEIGHT * _PRIOR)
        self._ratio = {False: 1.0, True: 1.0}  # by whether the iteration drafted
        self._seen = {False: 0, True: 0}
        self._batch, self._length = 0, 0.0
        self._plain_steps, self._probe_after, self._probing, self._since_switch = 0, _PROBE_AFTER, 0, 0

    @property
    def acceptance(self) -> np.ndarray:
        """Chance of each draft position given the ones before it."""
        return self._taken / self._tried

    def prepare(self, plan: StepPlan) -> None:
        lengths = plan.starts + plan.rows
        batch, length = plan.num_items, float(lengths.mean())
        if batch != self._batch or abs(length - self._length) > 0.1 * self._length:
            self._batch, self._length = batch, length
            if self._seen[False] >= _WARM and not self._probing:
                self._choose()

    def observe(self, plan: StepPlan, rounds: Sequence[tuple[int, int]], seconds: float) -> None:
        drafted_any = False
        for drafted, accepted in rounds:
            if drafted:
                drafted_any = True
                self._learn(drafted, accepted)
        plain = not plan.num_sparse and bool(plan.emit.all()) and int(plan.rows.max()) == 1
        self._correct(plan, plain, seconds)
        if self.k == 0:
            self._plain_steps += 1
            if self._seen[False] == _WARM:
                self._choose()
            elif self._plain_steps >= self._probe_after:
                self._probe()
        elif drafted_any:
            self._probing = max(0, self._probing - 1)
            if not self._probing and self._since_switch >= _SETTLE:
                self._choose()
        self._since_switch += 1

    def _learn(self, drafted: int, accepted: int) -> None:
        reached = min(drafted, accepted + 1)
        self._tried[:reached] += 1
        self._taken[:min(accepted, drafted)] += 1
        over = self._tried > _MEMORY
        self._taken[over] *= _MEMORY / self._tried[over]
        self._tried[over] = _MEMORY

    def _correct(self, plan: StepPlan, plain: bool, seconds: float) -> None:
        drafting = plan.num_sparse > 0 and int(plan.rows.max()) <= self.most + 1
        if not (plain or drafting) or (drafting and self.k == 0):
            return
        expected = self.costs.iteration(self._batch, self._length, self.k if drafting else 0, self._view())
        ratio = min(max(seconds / expected, 0.1), 10.0)
        self._seen[drafting] += 1
        if self._seen[drafting] == 1 and not drafting:
            self._ratio = {False: ratio, True: ratio}  # the machine's pace; what drafting adds to it is yet to be seen
        self._ratio[drafting] += max(_SMOOTH, 1 / self._seen[drafting]) * (ratio - self._ratio[drafting])

    @property
    def costs(self) -> StepCosts:
        """The measurement, made when it is first needed."""
        if self._costs is None:
            self._costs = self._measure()
        return self._costs

    def _view(self) -> float:
        """Entries that a draft sees on average."""
        return min(self._length, self.policy.budget(int(self._length)) + 1.5 * self.most)

    def _gain(self, k: int, acceptance: np.ndarray) -> float:
        model = gain(self.costs, self._batch, self._length, k, self._view(), expected_tokens(acceptance.tolist(), k))
        return model * self._ratio[False] / self._ratio[True]

    def _choose(self) -> None:
        """Set k to the best choice, with hysteresis."""
        acceptance = self.acceptance
        gains = {k: self._gain(k, acceptance) for k in self.choices}
        best = max(gains, key=gains.__getitem__)
        if self.k == 0:
            if gains[best] > _ON:
                self._probe_after = _PROBE_AFTER
                self._switch(best)
        elif gains[best] < _KEEP:
            self._switch(0)
        elif self.k not in gains or gains[best] > _BETTER * gains[self.k]:
            self._switch(best)

    def _switch(self, k: int) -> None:
        self.k, self._plain_steps, self._since_switch = k, 0, 0

    def _probe(self) -> None:
        """Draft again for a few rounds, if acceptance could make it pay at all; wait longer before the next try."""
        self._plain_steps = 0
        self._probe_after = min(2 * self._probe_after, 64 * _PROBE_AFTER)
        best = max(self.choices, key=lambda k: self._gain(k, np.ones(self.most)))
        if self._gain(best, np.ones(self.most)) > _ON:
            self._switch(min(best, 4))
            self._probing = 2
