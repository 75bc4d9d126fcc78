"""What a simulation found: the same figures from both engines."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsespec.plan.options import SystemOptions


@dataclass(frozen=True)
class Report:
    """Times in seconds, sizes in tokens, over all replicas.

    pool_use: mean share of the KV pools that holds tokens, from start to end; pool_use_loaded: while requests wait, once the
    pool has kept one waiting (for loaded_seconds on average over replicas). slot_use: share of the running requests'
    iterations in which they do work. gemm_rows_*: rows of drafts and verifications (prompts left out) an iteration, over
    the loaded iterations, or all where there are none; std: within a few neighbouring rounds, None where the fluid engine
    takes phases as evenly mixed. link_use: share of the time in which a copy is under way, mean of both directions.
    """

    name: str
    system: SystemOptions
    requests: int
    output_tokens: int
    seconds: float
    latency_p50: float
    latency_p99: float
    pool_use: float
    pool_use_loaded: float | None
    loaded_seconds: float
    mean_running: float
    slot_use: float
    stalled_slots: float
    iterations: float
    step_ms: float
    gemm_rows_mean: float
    gemm_rows_std: float | None
    preemptions: int
    recomputed_tokens: int
    offloaded_tokens: int
    restored_tokens: int
    link_use: float
    transfer_wait: float
    wall_seconds: float = field(compare=False, default=0.0)

    @property
    def throughput(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def recomputed_share(self) -> float:
        """Recomputed tokens for each output token."""
        return self.recomputed_tokens / self.output_tokens

    def document(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "throughput": self.throughput, "recomputed_share": self.recomputed_share}


def latencies(finished: npt.NDArray[np.float64], arrivals: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Median and 99th percentile of the time from arrival to the last token."""
    p50, p99 = np.percentile(finished - arrivals, [50, 99])
    return float(p50), float(p99)
