"""The exact engine: the real scheduler and KV manager, step by step, with a scripted device. The one file that knows them.

The device accepts drafts by chance and takes the time that the cost model gives to the plan's rows and KV. Copies to and from
the host take their time on a link, one after the other, beside the steps. Delayed verification is refused.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from sparsespec.config.engine import SchedulerConfig
from sparsespec.core.errors import CapacityError, UnsupportedError
from sparsespec.core.plan import StepPlan, StepResult
from sparsespec.core.request import DraftTraits, Request
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.kv.allocator import IntArray
from sparsespec.kv.copier import Side
from sparsespec.kv.table import PageTable
from sparsespec.plan.costs import CostModel
from sparsespec.plan.options import DraftOptions, SystemOptions
from sparsespec.plan.report import Report, latencies
from sparsespec.plan.workload import Load
from sparsespec.scheduler.kv_policy import make_kv_policy
from sparsespec.scheduler.memory import Memory
from sparsespec.scheduler.phases import make_phases
from sparsespec.scheduler.scheduler import Scheduler

_PAGE = 16
_WINDOW = 4  # rounds within which GEMM rows are compared
_TOKEN = 1  # what the scripted device always says
_HOST = 4  # size of the host pool, in device pools


class _Link:
    """The copier: a copy is done when the link has had the time for it. `now`, in ms, is set by whoever keeps the time."""

    def __init__(self, ms_per_page: float) -> None:
        self.ms_per_page, self.now, self.free = ms_per_page, 0.0, 0.0

    def copy(self, src: Side, dst: Side, src_pages: IntArray, dst_pages: IntArray) -> float:
        self.free = max(self.free, self.now) + len(src_pages) * self.ms_per_page
        return self.free

    def done(self, handle: float) -> bool:
        return self.now >= handle


@dataclass
class _Meter:
    """Sums over ms, and decoding rows by iteration."""

    kv: float = 0.0
    kv_loaded: float = 0.0
    loaded: float = 0.0
    running: float = 0.0
    busy: float = 0.0
    rows: list[int] = field(default_factory=list)
    rows_loaded: list[int] = field(default_factory=list)


class Exact:
    """One replica. `run` replays a load."""

    def __init__(self, load: Load, costs: CostModel, draft: DraftOptions, system: SystemOptions, seed: int) -> None:
        _refuse(system)
        self.load, self.costs, self.draft, self.system = load, costs, draft, system
        self.k = draft.num_speculative_tokens if system.method != "none" else 0
        self.rng = np.random.default_rng(seed)
        self.chance = np.array(draft.profile)
        capacity = system.kv_cache_tokens or costs.pool_tokens()
        self.page = min(_PAGE, max(1, capacity // 4096))  # small pools: less lost in half-filled pages
        self.limits = load.prompts + load.outputs
        most = int(self.limits.max())
        if most > capacity // self.page * self.page:
            raise CapacityError("kv_cache_tokens", capacity, f"request {int(self.limits.argmax())} needs {most} tokens of KV",
                                "Give a larger pool, or lower max_output_len")
        slots = system.max_num_seqs
        table = PageTable(slots, most, self.page, capacity // self.page)
        self.capacity = table.capacity
        drafts = max(self.k, 1)
        self.link = _Link(costs.transfer(self.page))
        memory = Memory(table, host_pages=_HOST * table.allocator.num_pages, copier=self.link, round_tokens=self.k + 1)
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs=slots), system.max_num_batched_tokens, memory,
                                   make_kv_policy(system.kv_policy, host=True), make_phases(system.schedule, drafts, slots), drafts,
                                   lambda policy: self.k)
        self.now, self.blocked = 0.0, False
        self.meter = _Meter()
        self.finished = np.zeros(len(load))

    def run(self, name: str) -> Report:
        """Replay the load to its end."""
        begun = time.perf_counter()
        s, arrivals, coming = self.scheduler, self.load.arrivals * 1e3, 0
        numbers: dict[Request, int] = {}
        while coming < len(self.load) or s.has_work():
            if not s.has_work():
                self.now = max(self.now, float(arrivals[coming]))
            while coming < len(self.load) and arrivals[coming] <= self.now:
                request = self._request(coming)
                numbers[request] = coming
                s.add(request)
                coming += 1
            self.link.now = self.now
            plan = s.schedule()
            if plan is None and len(s.memory.transfers):
                self.now = max(self.now, self.link.free)  # everybody waits for copies
                continue
            if plan is None:
                raise CapacityError("kv_cache_tokens", self.capacity, "no request can run", "Give a larger pool")
            self._charge(plan)
            for commit in s.commit(plan, self._device(plan)):
                if commit.finish_reason is not None:
                    s.finish(commit.request)
                    self.finished[numbers.pop(commit.request)] = self.now
        return self._report(name, time.perf_counter() - begun)

    def _request(self, i: int) -> Request:
        prompt, output = int(self.load.prompts[i]), int(self.load.outputs[i])
        return Request(str(i), [_TOKEN] * prompt, SamplingParams(max_tokens=output), 0, False, prompt + output, frozenset(),
                       frozenset(), traits=DraftTraits(0, self.k, selects=self.k > 0))

    def _device(self, plan: StepPlan) -> StepResult:
        """Accepts each draft with the chance of its position."""
        items = np.flatnonzero(plan.emit)
        drafted = plan.drafted[items]
        width = int(drafted.max(initial=0)) + 1
        kept = self.rng.random((len(items), width - 1)) < self.chance[:width - 1]
        kept &= np.arange(width - 1) < drafted[:, None]
        accepted = np.cumprod(kept, 1).sum(1)
        return StepResult(items.astype(np.int32), np.full((len(items), width), _TOKEN), (accepted + 1).astype(np.int32),
                          np.zeros(len(items), bool))

    def _charge(self, plan: StepPlan) -> None:
        """Let the step's time pass, and account for it."""
        m, s, costs = self.meter, self.scheduler, self.costs
        ends = (plan.starts + plan.rows).astype(np.int64)
        prefill = ~plan.sparse & (plan.rows > plan.drafted + 1)
        views = np.maximum(self.draft.sparse_attn_ratio * ends, self.draft.min_budget) + plan.drafted + 1
        device = costs.gemm(plan.num_rows) + costs.overhead() + costs.attention(
            float(ends[~plan.sparse].sum()), float(np.minimum(ends, views)[plan.sparse].sum()), scored=self.k > 0)
        for i in np.flatnonzero(prefill).tolist():
            device += costs.prefill_attention(int(plan.rows[i]), int(ends[i]))
        running, kv = s.num_running, int(ends.sum())
        ms = costs.step(device, running, self.system.verification)
        self.blocked = bool(s.waiting) and (self.blocked or running < self.system.max_num_seqs)
        m.kv += kv * ms
        m.running += running * ms
        m.busy += ms
        decoding = int(plan.rows[~prefill].sum())
        m.rows.append(decoding)
        if self.blocked:
            m.kv_loaded += kv * ms
            m.loaded += ms
            m.rows_loaded.append(decoding)
        self.now += ms

    def _report(self, name: str, wall: float) -> Report:
        m, c = self.meter, self.scheduler.counters
        seconds = float(self.finished.max()) / 1e3
        mean, std = _spread(np.array(m.rows_loaded or m.rows, float), _WINDOW * (self.k + 1))
        p50, p99 = latencies(self.finished / 1e3, self.load.arrivals)
        span = seconds * 1e3
        swapper = self.scheduler.memory.swapper
        link = self.costs.transfer(swapper.offloaded_tokens + swapper.restored_tokens)
        return Report(
            name=name, system=self.system, requests=len(self.load), output_tokens=c.num_emitted_tokens, seconds=seconds,
            latency_p50=p50, latency_p99=p99, pool_use=m.kv / self.capacity / span,
            pool_use_loaded=m.kv_loaded / self.capacity / m.loaded if m.loaded else None, loaded_seconds=m.loaded / 1e3,
            mean_running=m.running / span, slot_use=1.0, stalled_slots=0.0, iterations=c.iterations, step_ms=m.busy / c.iterations,
            gemm_rows_mean=mean, gemm_rows_std=std, preemptions=c.num_preemptions, recomputed_tokens=c.num_recomputed_tokens,
            offloaded_tokens=swapper.offloaded_tokens, restored_tokens=swapper.restored_tokens, link_use=link / 2 / span,
            transfer_wait=0.0, wall_seconds=wall)


def _spread(rows: np.ndarray, window: int) -> tuple[float, float]:
    """Mean, and root mean square of the deviation within windows."""
    whole = len(rows) // window * window
    parts = rows[:whole].reshape(-1, window) if whole else rows[None]
    return float(rows.mean()), float(np.sqrt(parts.var(axis=1).mean()))


def _refuse(system: SystemOptions) -> None:
    """Raise for what only the fluid engine models."""
    if system.verification == "delayed" and system.method != "none":
        raise UnsupportedError("verification", "delayed", "the exact engine drives a scheduler without it",
                               "Use --engine fluid, or verification sync or device")
    if system.replicas > 1:
        raise UnsupportedError("replicas", system.replicas, "the exact engine runs one replica", "Use --engine fluid")
    if system.reserve_tokens is not None:
        raise UnsupportedError("reserve_tokens", system.reserve_tokens, "the scheduler reserves what a request may reach",
                               "Use --engine fluid, or leave it out")


def run_exact(load: Load, costs: CostModel, draft: DraftOptions, system: SystemOptions, name: str = "", seed: int = 0) -> Report:
    """Replay the load with the engine's scheduler. Raises CapacityError and UnsupportedError."""
    return Exact(load, costs, draft, system, seed).run(name)
