"""How many drafts a round makes and how much they see: fixed, or chosen from measured costs and acceptance so that drafting
never loses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from sparsespec.core.plan import StepPlan
from sparsespec.spec.base import DraftPolicy
from sparsespec.spec.cost import StepCosts, expected_tokens, most_gain

_PRIOR, _PRIOR_WEIGHT = 0.85, 4.0  # acceptance before anything was seen, worth this many rounds
_MEMORY = 256.0  # rounds that an estimate remembers
_ON, _KEEP = 1.08, 1.02  # predicted gain that starts drafting, and that keeps it
_BETTER = 1.03  # another choice must gain this much over the present one
_CHOICES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
_SCALES = (0.5, 1.0, 2.0, 4.0)  # budgets that are tried, as multiples of the configured one
_CLOSER = 0.75  # what a budget twice as large is thought to leave of the rejections, until it was tried
_PROBE_AFTER = 1024  # plain iterations before drafting is tried again; doubles with each failure
_SMOOTH = 0.1  # least weight of a new measurement in a running mean
_WARM = 8  # plain iterations that are measured before drafting is considered: they cost nothing
_SETTLE_STEPS, _SETTLE_ROUNDS = 12, 16  # drafting iterations, or rounds, before the choice is looked at again


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


class _Acceptance:
    """Chance of each draft position given the ones before it, for each budget, with a memory of some rounds."""

    def __init__(self, scales: Sequence[float], most: int) -> None:
        self.scales = scales
        self._tried, self._taken = np.zeros((2, len(scales), most))

    def learn(self, arm: int, drafted: int, accepted: int) -> None:
        reached = min(drafted, accepted + 1)
        tried, taken = self._tried[arm], self._taken[arm]
        tried[:reached] += 1
        taken[:min(accepted, drafted)] += 1
        over = tried > _MEMORY
        taken[over] *= _MEMORY / tried[over]
        tried[over] = _MEMORY

    def estimate(self, arm: int) -> np.ndarray:
        """[most]. A budget that was hardly tried is judged by the one best known, its rejections scaled."""
        known = int(self._tried[:, 0].argmax())
        prior = (self._taken[known] + _PRIOR * _PRIOR_WEIGHT) / (self._tried[known] + _PRIOR_WEIGHT)
        if arm != known:
            prior = 1 - np.minimum((1 - prior) * _CLOSER ** math.log2(self.scales[arm] / self.scales[known]), 1.0)
        return (self._taken[arm] + prior * _PRIOR_WEIGHT) / (self._tried[arm] + _PRIOR_WEIGHT)


class AdaptiveLength(FixedLength):
    """Chooses k and the budget, or no drafts, as batch, context and acceptance change.

    Costs come from a short measurement, made once drafts could pay at all, and are corrected by the ratio of measured to
    predicted step times, for plain and drafting iterations apart. It begins plainly, which shows what there is to beat.
    weight_bytes, token_bytes: what a step reads of the weights, and of the KV cache for a token of context.
    """

    def __init__(self, policy: DraftPolicy, measure: Callable[[], StepCosts], weight_bytes: int, token_bytes: int) -> None:
        super().__init__(0)
        self.most, self.policy, self._measure = policy.config.num_speculative_tokens, policy, measure
        self._bytes = weight_bytes, token_bytes
        self.choices = sorted({c for c in _CHOICES if c < self.most} | {self.most})
        self.scales = _SCALES if policy.selects else (1.0,)
        self.arm = self.scales.index(1.0)
        self.acceptance = _Acceptance(self.scales, self.most)
        self._costs: StepCosts | None = None
        self._ratio = {False: 1.0, True: 1.0}  # by whether the iteration drafted
        self._seen = {False: 0, True: 0}
        self._passes, self._pass_rows = (1.0 if policy.selects else 0.0), 1.0  # draft passes a draft, and rows of each
        self._batch, self._length = 0, 0.0
        self._plain_steps, self._probe_after = 0, _PROBE_AFTER
        self._failed_at: float | None = None  # tokens of context in the batch when drafting last failed
        self._since_switch, self._rounds = 0, 0

    def prepare(self, plan: StepPlan) -> None:
        lengths = plan.starts + plan.rows
        batch, length = plan.num_items, float(lengths.mean())
        if batch != self._batch or abs(length - self._length) > 0.1 * self._length:
            self._batch, self._length = batch, length
            if self._failed_at and not 0.25 < batch * length / self._failed_at < 4.0:
                self._failed_at = None  # what failed there says little of here
            if self._seen[False] >= _WARM and self.k == 0 and self._failed_at is None:
                self._choose()

    def observe(self, plan: StepPlan, rounds: Sequence[tuple[int, int]], seconds: float) -> None:
        tried = [r for r in rounds if r[0]]
        for drafted, accepted in tried:
            self.acceptance.learn(self.arm, drafted, accepted)
        self._rounds += len(tried)
        self._count_passes(plan, sum(d for d, _ in tried))
        if self._could_pay():
            self._correct(plan, seconds)
        if self.k == 0:
            self._plain_steps += 1
            if self._seen[False] == _WARM and self._failed_at is None:
                self._choose()
            elif self._plain_steps >= self._probe_after:
                self._probe()
        elif tried and (self._since_switch >= _SETTLE_STEPS or self._rounds >= _SETTLE_ROUNDS):
            self._choose()
        self._since_switch += 1

    def _could_pay(self) -> bool:
        """Whether a perfect draft could gain enough: sparse drafts save nothing but KV reads."""
        if self.policy.proposes or not self._batch:
            return True
        weights, token = self._bytes
        return most_gain(weights, self._batch * self._length * token) >= _ON

    def _count_passes(self, plan: StepPlan, drafted: int) -> None:
        if self.policy.selects and self.policy.proposes and plan.num_sparse:
            self._pass_rows += _SMOOTH * (plan.num_sparse_rows / plan.num_sparse - self._pass_rows)
            if drafted:
                self._passes = min(1.0, self._passes + _SMOOTH * (plan.num_sparse / drafted - self._passes))

    def _correct(self, plan: StepPlan, seconds: float) -> None:
        drafting = bool(plan.num_sparse) or bool(plan.drafted.any())
        plain = not drafting and bool(plan.emit.all()) and int(plan.rows.max()) == 1
        if not (plain or drafting) or int(plan.rows.max()) > self.most + 1 or (drafting and self.k == 0):
            return
        ratio = min(max(seconds / self._predicted(plan), 0.1), 10.0)
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

    def _predicted(self, plan: StepPlan) -> float:
        """Predicted seconds of this very step: the first after a switch are not like the mean, as nobody verifies in them."""
        full = plan.num_items - plan.num_sparse
        rows = (plan.num_rows - plan.num_sparse_rows) / max(full, 1)
        return self.costs.step(plan.num_rows, full, rows, self._length, plan.num_sparse_rows, self._view(self.arm),
                               float(plan.collect.sum()))

    def _view(self, arm: int) -> float:
        """Entries that a draft row sees."""
        return min(self._length, self.policy.base_budget(int(self._length)) * self.scales[arm] + 1.5 * self.most)

    def _iteration(self, k: int, arm: int) -> float:
        """Predicted seconds of a mean iteration."""
        return self.costs.iteration(self._batch, self._length, k, self._view(arm), self._passes * k, self._pass_rows)

    def _gain(self, k: int, arm: int, acceptance: np.ndarray) -> float:
        """Speed-up over plain decoding."""
        speed = expected_tokens(acceptance.tolist(), k) / (self._passes * k + 1)
        return speed * self._iteration(0, arm) * self._ratio[False] / (self._iteration(k, arm) * self._ratio[True])

    def _choose(self) -> None:
        """Set k and the budget to the best choice, with hysteresis."""
        if self.k == 0 and not self._could_pay():
            return
        gains = {(k, arm): self._gain(k, arm, accepted) for arm, accepted in
                 ((arm, self.acceptance.estimate(arm)) for arm in range(len(self.scales))) for k in self.choices}
        best = max(gains, key=gains.__getitem__)
        if self.k == 0:
            if gains[best] > _ON:
                self._switch(*best)
        elif gains[best] < _KEEP:
            self._switch(0, self.arm)
            self._failed_at = self._batch * self._length
        else:
            now = gains.get((self.k, self.arm), 0.0)
            if now >= _KEEP:
                self._probe_after, self._failed_at = _PROBE_AFTER, None
            if gains[best] > _BETTER * now:
                self._switch(*best)

    def _switch(self, k: int, arm: int) -> None:
        self.k, self.arm, self.policy.scale = k, arm, self.scales[arm]
        self._plain_steps = self._since_switch = self._rounds = 0

    def _probe(self) -> None:
        """Draft again for a few rounds, if acceptance could make it pay at all; wait longer before the next try."""
        self._plain_steps = 0
        self._probe_after = min(2 * self._probe_after, 64 * _PROBE_AFTER)
        perfect = np.ones(self.most)
        best = max(self.choices, key=lambda k: self._gain(k, self.arm, perfect))
        if self._could_pay() and self._gain(best, self.arm, perfect) > _ON:
            self._switch(min(best, 4), self.arm)
