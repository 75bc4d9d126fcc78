"""Which rows of which requests the next iteration computes, and what becomes of them.

State is a row of arrays a slot, so that a step costs a few array operations however many requests run. A request is
described by three numbers: `length` committed tokens, `computed` of them with committed KV, `drafted` drafts after
them. A prefill chunk, a draft and a verification follow from these; the only commit point is `commit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sparsespec.config.engine import SchedulerConfig
from sparsespec.core.plan import StepPlan, StepResult
from sparsespec.core.request import Request
from sparsespec.kv.table import PageTable
from sparsespec.scheduler.phases import Phases

_MIN_CHUNK = 32  # prefill rows that decoding can not crowd out
_STOP_IDS = 16


@dataclass
class Commit:
    """Tokens that one request gained, and whether an EOS or stop id ended it (`stop`), or a limit (`length`).

    bad: the logits after these tokens are NaN or infinite, so it cannot go on.
    """

    request: Request
    item: int
    tokens: list[int]
    drafted: int
    accepted: int
    finish_reason: str | None
    stop_token: int | None
    bad: bool = False


@dataclass
class Counters:
    """What the scheduler counts, for stats()."""

    iterations: int = 0
    gemm_rows: int = 0
    num_prompt_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)


class Scheduler:
    """See the module. draft_length: () → k that rounds begin with now, 0 for plain decoding."""

    def __init__(self, config: SchedulerConfig, max_rows: int, pages: PageTable, phases: Phases, max_drafts: int,
                 draft_length: Callable[[], int], *, needs_selection: bool, reserve: bool) -> None:
        n = config.max_num_seqs
        self.pages, self.phases, self.draft_length = pages, phases, draft_length
        self.max_rows, self.needs_selection, self.reserve = max_rows, needs_selection, reserve
        self.waiting: deque[Request] = deque()
        self.requests: list[Request | None] = [None] * n
        self._free = list(range(n - 1, -1, -1))
        self.active = np.zeros(n, bool)
        self.length, self.computed, self.drafted, self.target, self.limit = (np.zeros(n, np.int32) for _ in range(5))
        self.order = np.zeros(n, np.int64)  # by admission
        self.selected = np.zeros(n, bool)
        self.stop_ids = np.full((n, _STOP_IDS), -1, np.int64)
        self.min_length = np.zeros(n, np.int32)
        self.now, self._admissions = 0, 0
        self.admitted: list[Request] = []  # since the runner last looked, as are the slots that were left
        self.vacated: list[int] = []
        self.counters = Counters(accepted_per_position=[0] * max_drafts, drafted_per_position=[0] * max_drafts)

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; FIFO."""
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Forget a request, wherever it is, and free what it holds."""
        if request.slot >= 0:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def preempt(self, request: Request) -> None:
        """Take a running request off the device; it waits at the head of the queue and computes its KV again."""
        slot = request.slot
        self.counters.num_preemptions += 1
        self.counters.num_recomputed_tokens += int(self.computed[slot])
        request.metrics.num_preemptions += 1
        self._leave(request)
        self.waiting.appendleft(request)

    @property
    def num_running(self) -> int:
        return len(self.requests) - len(self._free)

    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting) or self.num_running > 0

    def _leave(self, request: Request) -> None:
        slot = request.slot
        self.phases.end(slot)
        self.pages.release(slot)
        self.requests[slot] = None
        self.active[slot] = False
        self._free.append(slot)
        self.vacated.append(slot)
        if request in self.admitted:
            self.admitted.remove(request)
        request.slot = -1

    def _admit(self) -> None:
        """FIFO: the head of the queue waits for pages, and nobody passes it."""
        while self.waiting and self._free:
            request = self.waiting[0]
            tokens = request.num_tokens
            slot = self._free[-1]
            held = request.limit if self.reserve else tokens + 1
            if not self.pages.grow(slot, min(held, request.limit), request.limit):
                return
            self.waiting.popleft()
            self._free.pop()
            self._seat(request, slot, tokens)

    def _seat(self, request: Request, slot: int, tokens: int) -> None:
        self._admissions += 1
        request.slot = slot
        self.requests[slot] = request
        self.active[slot] = True
        self.length[slot], self.computed[slot], self.drafted[slot], self.target[slot] = tokens, 0, 0, 0
        self.limit[slot], self.order[slot] = request.limit, self._admissions
        self.selected[slot] = False
        self.min_length[slot] = len(request.prompt_token_ids) + request.params.min_tokens
        ids = sorted(request.stop_ids)
        if len(ids) > self.stop_ids.shape[1]:
            extra = len(ids) - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, extra)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, :len(ids)] = ids
        self.admitted.append(request)

    # -- one iteration -------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next iteration, or None when nothing can run."""
        self._admit()
        while True:
            plan = self._plan()
            if plan is None or self._hold(plan):
                break
        if plan is not None:
            self.now += 1
            self.counters.iterations += 1
            self.counters.gemm_rows += plan.num_rows
        return plan

    def _plan(self) -> StepPlan | None:
        slots = np.flatnonzero(self.active).astype(np.int32)
        length, computed, drafted = self.length[slots], self.computed[slots], self.drafted[slots]
        decoding = length - computed == 1
        sparse = decoding & (drafted < self.target[slots])
        rows = np.where(sparse, 1, length + drafted - computed)
        prefill = np.flatnonzero(~decoding)
        if len(prefill):
            prefill = prefill[np.argsort(self.order[slots[prefill]])]
            budget = max(self.max_rows - int(rows[decoding].sum()), min(_MIN_CHUNK, 1 + self.max_rows // 4))
            before = np.cumsum(rows[prefill]) - rows[prefill]
            rows[prefill] = np.clip(budget - before, 0, rows[prefill])
        order = np.concatenate([np.flatnonzero(sparse), np.flatnonzero(~sparse & (rows > 0))])
        if not len(order):
            return None
        slots, rows, sparse, drafted = slots[order], rows[order].astype(np.int32), sparse[order], drafted[order]
        starts = np.where(sparse, length[order] - 1 + drafted, computed[order]).astype(np.int32)
        emit = ~sparse & (starts + rows == length[order] + drafted)
        room = self.limit[slots] - length[order] > 1
        collect = emit & room & (self.needs_selection and self.draft_length() > 0)
        return StepPlan(slots, starts, rows, np.where(emit | sparse, drafted, 0).astype(np.int32), sparse, emit, collect)

    def _hold(self, plan: StepPlan) -> bool:
        """Take the pages that the plan writes to. False: a request had to be preempted, plan again."""
        ends = plan.starts + plan.rows
        for i in np.flatnonzero(self.pages.needed(ends) > self.pages.counts[plan.slots]):
            slot, end = int(plan.slots[i]), int(ends[i])
            while not self.pages.grow(slot, end):
                running = np.flatnonzero(self.active)
                victim = int(running[np.argmax(self.order[running])])
                request = self.requests[victim]
                if request is None:
                    raise RuntimeError(f"slot {victim} is active without a request")
                self.preempt(request)
                return False
        return True

    def commit(self, plan: StepPlan, result: StepResult) -> list[Commit]:
        """Take a step's results into the state: the one place where tokens and KV become committed."""
        slots = plan.slots
        self.drafted[slots[plan.sparse]] += 1
        partial = ~plan.sparse & ~plan.emit
        self.computed[slots[partial]] += plan.rows[partial]
        if not len(result.items):
            return []
        emitting = slots[result.items]
        self.selected[emitting] = plan.collect[result.items]
        counts, ended, stopped = self._cut(emitting, result)
        drafted = plan.drafted[result.items]
        accepted = np.minimum(result.num_tokens - 1 + result.bad, counts)
        bad = result.bad & ~ended & ~stopped
        self._count(drafted, accepted, counts)
        self.length[emitting] += counts
        self.computed[emitting] = self.length[emitting] - 1
        self.drafted[emitting] = 0
        k = self.draft_length()
        commits = []
        for i, slot in enumerate(emitting.tolist()):
            request = self.requests[slot]
            if request is None:
                raise RuntimeError(f"slot {slot} emitted tokens without a request")
            tokens = result.tokens[i, :counts[i]].tolist()
            request.output_token_ids.extend(tokens)
            reason = "stop" if stopped[i] else "length" if ended[i] else None
            commits.append(Commit(request, int(result.items[i]), tokens, int(drafted[i]), int(accepted[i]), reason,
                                  tokens[-1] if stopped[i] else None, bool(bad[i])))
            if reason is None and not bad[i]:
                self._begin_round(slot, k)
        return commits

    def _begin_round(self, slot: int, k: int) -> None:
        most = min(k, int(self.limit[slot] - self.length[slot]) - 1)
        if self.needs_selection and not self.selected[slot]:
            most = 0
        self.target[slot] = self.phases.begin(self.now, slot, most)

    def _cut(self, slots: np.ndarray, result: StepResult) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How many of each request's new tokens count, whether that ends it, and whether a stop id did."""
        width = result.tokens.shape[1]
        column = np.arange(width)
        counts = np.minimum(result.num_tokens, self.limit[slots] - self.length[slots])
        place = self.length[slots][:, None] + column  # index of the token in its sequence
        is_stop = (result.tokens[:, :, None] == self.stop_ids[slots][:, None, :]).any(-1)
        is_stop &= (place + 1 >= self.min_length[slots][:, None]) & (column < counts[:, None])
        first = np.where(is_stop.any(1), is_stop.argmax(1), width)
        stopped = first < counts
        counts = np.where(stopped, first + 1, counts)
        return counts, self.length[slots] + counts >= self.limit[slots], stopped

    def _count(self, drafted: np.ndarray, accepted: np.ndarray, counts: np.ndarray) -> None:
        c = self.counters
        c.num_drafts += int((drafted > 0).sum())
        c.num_draft_tokens += int(drafted.sum())
        c.num_accepted_tokens += int(accepted[drafted > 0].sum())
        c.num_emitted_tokens += int(counts.sum())
        for position in range(int(drafted.max(initial=0))):
            c.accepted_per_position[position] += int((accepted > position).sum())
            c.drafted_per_position[position] += int((drafted > position).sum())

    def check(self) -> None:
        """Integrity of slots and pages. Raises RuntimeError."""
        self.pages.check()
        for slot, request in enumerate(self.requests):
            if (request is not None) != bool(self.active[slot]) or (request is None and self.pages.counts[slot]):
                raise RuntimeError(f"slot {slot} is out of step with its request")
