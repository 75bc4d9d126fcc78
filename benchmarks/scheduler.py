"""What the scheduler costs: one schedule() and one commit(), by running requests and by context. No model, no torch.

    python benchmarks/scheduler.py --json results/scheduler.json

The real scheduler and KV manager at steady state; results are made up, and made outside the timed part: drafts are accepted by
a fixed stream of chances. What the engine does with the commits (text, outputs) is not part of it. Times are of single
iterations; where something else takes the core meanwhile, the median of the best of several passes is given.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sparsespec.config.engine import SchedulerConfig
from sparsespec.core.plan import StepPlan, StepResult
from sparsespec.core.request import DraftTraits, Request
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.kv.table import PageTable
from sparsespec.scheduler.kv_policy import make_kv_policy
from sparsespec.scheduler.memory import Memory
from sparsespec.scheduler.phases import make_phases
from sparsespec.scheduler.scheduler import Scheduler

_ACCEPT = 0.85  # chance of a draft
_WARM_UP = 40  # iterations until the buckets are level


class World:
    """`running` requests with a context of `context` tokens that all decode. k: 0 for plain decoding."""

    def __init__(self, running: int, context: int, page_size: int, k: int, iterations: int) -> None:
        self.k, self.rng = k, np.random.default_rng(0)
        limit = context + (_WARM_UP + iterations) * (k + 1)
        pages = running * (limit // page_size + 1)
        memory = Memory(PageTable(running, limit, page_size, pages), round_tokens=k + 1, prefix_caching=False)
        self.s = Scheduler(SchedulerConfig(max_num_seqs=running), running * context, memory, make_kv_policy("offload", host=False),
                           make_phases("unified", max(k, 1), running), max(k, 1), lambda policy: k)
        prompt, params = [1] * context, SamplingParams(max_tokens=limit - context)
        for i in range(running):
            self.s.add(Request(str(i), prompt, params, 0, False, limit, frozenset({0}), frozenset({0}),
                               traits=DraftTraits(0, k, selects=k > 0)))
        for _ in range(_WARM_UP):
            self.step()

    def step(self) -> tuple[int, int]:
        """Nanoseconds of schedule() and of commit()."""
        t0 = time.perf_counter_ns()
        plan = self.s.schedule()
        t1 = time.perf_counter_ns()
        if plan is None:
            raise RuntimeError("nothing runs")
        result = self._device(plan)
        t2 = time.perf_counter_ns()
        self.s.commit(plan, result)
        return t1 - t0, time.perf_counter_ns() - t2

    def _device(self, plan: StepPlan) -> StepResult:
        items = np.flatnonzero(plan.emit)
        kept = self.rng.random((len(items), self.k)) < _ACCEPT
        kept &= np.arange(self.k) < plan.drafted[items, None]
        accepted = np.cumprod(kept, 1).sum(1)
        return StepResult(items.astype(np.int32), np.ones((len(items), self.k + 1), np.int64), (accepted + 1).astype(np.int32),
                          np.zeros(len(items), bool))


def measure(running: int, context: int, page_size: int, k: int, iterations: int, passes: int) -> dict[str, float]:
    """One cell. Times in µs."""
    world = World(running, context, page_size, k, iterations * passes)
    best = np.full((iterations, 2), np.inf)
    for _ in range(passes):
        times = np.array([world.step() for _ in range(iterations)]) / 1e3
        best = min(best, times, key=lambda t: float(np.median(t.sum(1))))
    cell: dict[str, float] = {"running": running, "context": context, "page_size": page_size, "k": k}
    for name, column in (("schedule", best[:, 0]), ("commit", best[:, 1]), ("sum", best.sum(1))):
        cell[name], cell[f"{name}_p90"] = float(np.median(column)), float(np.quantile(column, 0.9))
    cell["per_request"] = cell["sum"] / running
    return cell


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 128, 256, 512, 1024])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--page-size", type=int, nargs="+", default=[16])
    parser.add_argument("--k", type=int, nargs="+", default=[8, 0], help="drafts a round; 0: plain decoding")
    parser.add_argument("--iterations", type=int, default=90, help="of a pass")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cells = []
    tqdm.write("µs: median (90 %)\n  k  page  running  context      schedule        commit           sum  a request")
    for cell in tqdm(list(product(args.k, args.page_size, args.running, args.context)), desc="cells"):
        k, page_size, running, context = cell
        c = measure(running, context, page_size, k, args.iterations, args.passes)
        cells.append(c)
        columns = "  ".join(f"{c[name]:5.0f} ({c[name + '_p90']:4.0f})" for name in ("schedule", "commit", "sum"))
        tqdm.write(f"{k:3d}  {page_size:4d}  {running:7d}  {context:7d}  {columns}  {c['per_request']:9.2f}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(cells, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
