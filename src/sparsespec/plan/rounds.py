"""A round of drafts and its verification as one rate: what the fluid engine charges for a token.

Of the running requests each makes, per round, k draft steps of one row over its view, one verification of k + 1 rows over all
of its KV, and with delayed verification one iteration in which it waits for the CPU.
"""

from __future__ import annotations

from sparsespec.plan.costs import CostModel
from sparsespec.plan.options import DraftOptions, SystemOptions
from sparsespec.spec.cost import expected_tokens

_GRID = 256  # points of the tabulated attention curve


class Rounds:
    """Milliseconds a round by requests and their KV. iterations, tokens: a round of one request."""

    def __init__(self, costs: CostModel, draft: DraftOptions, system: SystemOptions, capacity: int) -> None:
        self.costs, self.k = costs, draft.num_speculative_tokens if system.method != "none" else 0
        self.ratio, self.min_budget = draft.sparse_attn_ratio, draft.min_budget
        self.tokens = expected_tokens(draft.profile, self.k) if self.k else 1.0
        self.lockstep = system.schedule == "lockstep" and self.k > 0
        self.stalled = int(system.verification == "delayed" and self.k > 0)
        self.iterations = self.k + 1 + self.stalled
        self.verification = system.verification
        slots = system.max_num_seqs
        self._limit = max(2.0, 2.0 * capacity)  # tokens that an iteration may read, selection included
        self._attention = [costs.attention(self._limit * i / _GRID, 0.0) for i in range(_GRID + 1)]
        self._device = [[costs.gemm(rows) + costs.overhead() for rows in self.levels(b)] for b in range(slots + 1)]
        self._cpu = [costs.cpu(b) for b in range(slots + 1)]
        self._sync = system.verification == "sync"

    def levels(self, running: int) -> tuple[float, ...]:
        """GEMM rows of an iteration; in lockstep those of a draft and of a verification."""
        if self.lockstep:
            return running, running * (self.k + 1)
        return (running * (2 * self.k + 1) / self.iterations,) if self.k else (running,)

    def rows(self, running: int) -> tuple[float, float]:
        """Mean GEMM rows of an iteration, and their variance within a round: none where phases mix evenly."""
        levels = self.levels(running)
        if not self.lockstep:
            return levels[0], 0.0
        draft, verify = levels
        n = self.k + 1
        return (self.k * draft + verify) / n, self.k * ((verify - draft) / n) ** 2

    def _read(self, tokens: float) -> float:
        """Attention over `tokens` tokens read in place, ms; from the table."""
        place = tokens * _GRID / self._limit
        i = min(int(place), _GRID - 1)
        low = self._attention[i]
        return low + (self._attention[i + 1] - low) * (place - i)

    def _step(self, device: float, running: int) -> float:
        cpu = self._cpu[running]
        return device + cpu if self._sync else max(device, cpu)

    def round_ms(self, running: int, kv: float) -> float:
        """One round of all `running` requests with `kv` tokens of KV in all."""
        device = self._device[running]
        k = self.k
        if not k:
            return self._step(device[0] + self._read(kv), running)
        views = min(kv, max(self.ratio * kv, self.min_budget * running) + running * (k + 1) / 2) / self.costs.gpu.sparse_efficiency
        full = kv * (1 + self.costs.gpu.scoring_overhead)
        if self.lockstep:
            return k * self._step(device[0] + self._read(views), running) + self._step(device[1] + self._read(full), running)
        n = self.iterations
        return n * self._step(device[0] + self._read((full + k * views) / n), running)

    def prefill_ms(self, running: int, tokens: float) -> float:
        """What computing a prompt of `tokens` tokens beside `running` requests adds."""
        rows = self.rows(running)[0]
        return self.costs.gemm(rows + tokens) - self.costs.gemm(rows) + self.costs.prefill_attention(tokens, tokens)
