"""Which rows of which requests the next iteration computes, and what becomes of them.

State is a row of arrays a slot, so that a step costs a few array operations however many requests run. A request is
described by four numbers: `length` committed tokens, `computed` of them with committed KV, `drafted` drafts after
them, `proposed` tokens after those that a sparse pass has to check. A prefill chunk, a draft and a verification follow
from these; the only commit point is `commit`.
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
    num_draft_passes: int = 0  # sparse items; num_target_passes: full ones that yielded tokens
    num_target_passes: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)


class Scheduler:
    """See the module. draft_length: index of a policy → k that its rounds begin with now, 0 for plain decoding."""

    def __init__(self, config: SchedulerConfig, max_rows: int, pages: PageTable, phases: Phases, max_drafts: int,
                 draft_length: Callable[[int], int], *, reserve: bool) -> None:
        n = config.max_num_seqs
        self.pages, self.phases, self.draft_length = pages, phases, draft_length
        self.max_rows, self.reserve = max_rows, reserve
        self.waiting: deque[Request] = deque()
        self.requests: list[Request | None] = [None] * n
        self._free = list(range(n - 1, -1, -1))
        self.active = np.zeros(n, bool)
        self.length, self.computed, self.drafted, self.proposed = (np.zeros(n, np.int32) for _ in range(4))
        self.target, self.limit, self.policy, self.most = (np.zeros(n, np.int32) for _ in range(4))
        self.order = np.zeros(n, np.int64)  # by admission
        self.selects, self.proposes, self.selected = (np.zeros(n, bool) for _ in range(3))
        self.stop_ids = np.full((n, _STOP_IDS), -1, np.int64)
        self.min_length = np.zeros(n, np.int32)
        self.now, self._admissions = 0, 0
        self.admitted: list[Request] = []  # since the runner last looked, as are the slots that were left
        self.vacated: list[int] = []
        self.wants_proposals = np.zeros(0, np.int32)  # slots that `offer` is to be called for before the next iteration
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
        self.length[slot], self.computed[slot], self.drafted[slot], self.proposed[slot], self.target[slot] = tokens, 0, 0, 0, 0
        traits = request.traits
        self.policy[slot], self.most[slot] = traits.policy, traits.k
        self.selects[slot], self.proposes[slot] = traits.selects, traits.proposes
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
        sparse = decoding & self.selects[slots] & (drafted < self.target[slots])
        rows = np.where(sparse, 1 + self.proposed[slots], length + drafted - computed)
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
        collect = emit & self.selects[slots] & (self.limit[slots] - length[order] > 1)
        if collect.any():
            collect &= np.array([self.draft_length(int(p)) > 0 for p in range(int(self.policy.max()) + 1)])[self.policy[slots]]
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
        self._buffer(slots[:plan.num_sparse], result)
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
                self._begin_round(slot)
        begun = emitting[self.active[emitting] & self.proposes[emitting] & (self.target[emitting] > 0)]
        self.wants_proposals = np.concatenate([self.wants_proposals, begun.astype(np.int32)])
        return commits

    def _buffer(self, slots: np.ndarray, result: StepResult) -> None:
        """Enter what the sparse items drafted."""
        self.wants_proposals = np.zeros(0, np.int32)
        if not len(slots):
            return
        self.drafted[slots] += 1 if result.draft_counts is None else result.draft_counts
        self.proposed[slots] = 0
        self.counters.num_draft_passes += len(slots)
        proposing = slots[self.proposes[slots]]
        if len(proposing):
            full = self.drafted[proposing] >= self.target[proposing]
            for slot in proposing[full].tolist():
                self.phases.due(self.now, slot)
            self.wants_proposals = proposing[self.target[proposing] - self.drafted[proposing] > 1]

    def stop_drafting(self, slots: np.ndarray) -> None:
        """Verify what `slots` drafted so far in the next iteration."""
        self.target[slots] = self.drafted[slots]
        for slot in slots.tolist():
            self.phases.due(self.now, slot)

    def proposal_room(self, slots: np.ndarray) -> np.ndarray:
        """Most tokens that may be proposed to each of `slots` now: a sparse pass adds one of its own, a full one as well."""
        return self.target[slots] - self.drafted[slots] - self.selects[slots]

    def offer(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """A proposer put `counts` tokens after those of `slots`; at most `proposal_room`."""
        checked = self.selects[slots]
        self.proposed[slots[checked]] = counts[checked]
        direct = slots[~checked]
        self.drafted[direct] = self.target[direct] = counts[~checked]
        self.wants_proposals = np.zeros(0, np.int32)

    def _begin_round(self, slot: int) -> None:
        most = min(self.draft_length(int(self.policy[slot])), int(self.most[slot]), int(self.limit[slot] - self.length[slot]) - 1)
        if self.selects[slot]:
            self.target[slot] = self.phases.begin(self.now, slot, most if self.selected[slot] else 0)
        else:
            self.phases.due(self.now, slot)
            self.target[slot] = most if self.proposes[slot] else 0

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
        c.num_target_passes += len(drafted)
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
