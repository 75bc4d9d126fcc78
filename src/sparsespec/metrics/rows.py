"""Query rows of the iterations by what they were for: the mix that a good schedule keeps even."""

from __future__ import annotations

import numpy as np

from sparsespec.core.plan import StepPlan

PHASES = ("prefill", "draft", "verify", "decode")


class PhaseRows:
    """Totals since the start and the rows of the last iteration, by phase. decode: a request's one row without drafts."""

    def __init__(self) -> None:
        self.total = np.zeros(len(PHASES), np.int64)
        self.last = np.zeros(len(PHASES), np.int64)

    def count(self, plan: StepPlan) -> None:
        """Enter one iteration."""
        drafting, verifying = plan.sparse, ~plan.sparse & (plan.drafted > 0)
        decoding = ~plan.sparse & ~verifying & plan.emit & (plan.rows == 1)
        parts = [int(plan.rows[mask].sum()) for mask in (drafting, verifying, decoding)]
        self.last = np.array([int(plan.rows.sum()) - sum(parts), *parts], np.int64)
        self.total += self.last

    def stats(self) -> dict[str, dict[str, int]]:
        """rows_by_phase, last_rows_by_phase: plain dicts by the names of PHASES."""
        return {name: dict(zip(PHASES, values.tolist(), strict=True))
                for name, values in (("rows_by_phase", self.total), ("last_rows_by_phase", self.last))}
