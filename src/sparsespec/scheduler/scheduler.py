"""Which rows of which requests the next iteration computes, and what becomes of them.

State is a row of arrays a slot, so that a step costs a few array operations however many requests run. A request is
described by four numbers: `length` committed tokens, `computed` of them with committed KV, `drafted` drafts after
them, `proposed` tokens after those that a sparse pass has to check. A prefill chunk, a draft and a verification follow
from these; the only commit point is `commit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from sparsespec.config.engine import SchedulerConfig
from sparsespec.core.plan import StepPlan, StepResult
from sparsespec.core.request import Request
from sparsespec.scheduler.flights import Flights
from sparsespec.scheduler.kv_policy import KVPolicy
from sparsespec.scheduler.memory import Memory
from sparsespec.scheduler.outcome import Commit, Counters, cut
from sparsespec.scheduler.phases import Phases

_MIN_CHUNK = 32  # prefill rows that decoding can not crowd out
_REASONS = (None, "length", "stop")


class Scheduler:
    """See the module. draft_length: index of a policy → k of rounds that begin now, 0 for plain decoding; assumes: `launch`."""

    def __init__(self, config: SchedulerConfig, max_rows: int, memory: Memory, kv_policy: KVPolicy, phases: Phases, max_drafts: int,
                 draft_length: Callable[[int], int], *, assumes: bool = False) -> None:
        n = config.max_num_seqs
        self.memory, self.kv_policy, self.phases, self.draft_length = memory, kv_policy, phases, draft_length
        self.max_rows, self.assumes = max_rows, assumes
        self.waiting: deque[Request] = deque()
        self.requests: list[Request | None] = [None] * n
        self._free = list(range(n - 1, -1, -1))
        self.active = np.zeros(n, bool)  # False as well while a request is away from the device
        self.length, self.computed, self.drafted, self.proposed = (np.zeros(n, np.int32) for _ in range(4))
        self.target, self.limit, self.policy, self.most, self.sure = (np.zeros(n, np.int32) for _ in range(5))
        self.flights, self.drain = Flights(n), False  # drain: nothing can be planned before the results under way are known
        self.order = np.zeros(n, np.int64)  # by arrival on the device
        self.selects, self.proposes, self.selected, self.published = (np.zeros(n, bool) for _ in range(4))
        self.stop_ids = np.full((n, 1), -1, np.int64)  # as many columns as any request needed
        self.min_length = np.zeros(n, np.int32)
        self.now, self._arrivals = 0, 0
        self._lost: dict[Request, int] = {}  # committed KV that requests lost and have to compute again
        self.admitted: list[Request] = []  # since the runner last looked, as are the slots that were left
        self.vacated: list[int] = []
        self.wants_proposals = np.zeros(0, np.int32)  # slots that `offer` is to be called for before the next iteration
        self.counters = Counters(max_drafts)

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; FIFO."""
        self.waiting.append(request)

    def finish(self, request: Request, *, sound: bool = True) -> None:
        """Forget a request, wherever it is, and free what it holds on both pools. sound: its KV may serve others."""
        self._lost.pop(request, None)
        if request.slot >= 0:
            self._leave(request, sound)
        elif request in self.waiting:
            self.waiting.remove(request)

    def preempt(self, request: Request) -> None:
        """Take a running request off the device, as the policy does it."""
        self.kv_policy.displace(self, request.slot)

    def recompute(self, slot: int) -> None:
        """Take a request off the device; it waits at the head of the queue and computes its KV again."""
        request = self._at(slot)
        self._preempted(request)
        self._lost[request] = int(self.computed[slot])
        self.counters.num_recomputed_tokens += self._lost[request]
        self._leave(request, True)
        self.waiting.appendleft(request)

    def swap(self, slot: int) -> bool:
        """Send a running request to the host, its drafts dropped; False and no change if there is no room."""
        length = int(self.length[slot])
        if not self.memory.swap_out(slot, int(self.computed[slot]), length, int(self.limit[slot])):
            return False
        self._preempted(self._at(slot))
        self.phases.end(np.array([slot]))
        self.active[slot] = False
        self.drafted[slot] = self.proposed[slot] = self.target[slot] = 0
        return True

    def movable(self) -> np.ndarray:
        """Slots whose requests run and can be taken off the device now; with a step under way none, and it is to be drained."""
        if len(self.flights):
            self.drain = True
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.active)

    @property
    def num_running(self) -> int:
        """Requests on the device or on their way to it for the first time."""
        return len(self.requests) - len(self._free) - len(self.memory.swapper)

    def has_work(self) -> bool:
        """Whether any request waits, runs or is swapped."""
        return bool(self.waiting) or len(self._free) < len(self.requests)

    def _at(self, slot: int) -> Request:
        request = self.requests[slot]
        if request is None:
            raise RuntimeError(f"slot {slot} is in use without a request")
        return request

    def _preempted(self, request: Request) -> None:
        self.counters.num_preemptions += 1
        request.metrics.num_preemptions += 1

    def _leave(self, request: Request, sound: bool) -> None:
        slot = request.slot
        self.phases.end(np.array([slot]))
        in_place = sound and self.active[slot]  # not on the host, nor on its way back, nor lost on it
        self.memory.retire(slot, request, int(self.sure[slot]) if in_place else 0)
        self.requests[slot] = None
        self.active[slot] = False
        if request in self.admitted:
            self.admitted.remove(request)
        request.slot = -1
        if not self.flights.keep(slot):
            self._vacate(slot)

    def _vacate(self, slot: int) -> None:
        self.memory.release(slot)
        self.flights.clear(slot)
        self._free.append(slot)
        self.vacated.append(slot)

    def _settle(self) -> None:
        """What copies brought that have ended."""
        returned, loaded = self.memory.take_ended()
        for slot, tokens in returned:
            if tokens < 0:
                self.recompute(slot)
                continue
            self._arrive(slot)
            if self.length[slot] - self.computed[slot] == 1:
                self._begin_rounds(np.array([slot]))
        for slot, tokens in loaded:
            self._found(slot, tokens - int(self.computed[slot]))
            self._arrive(slot)

    def _arrive(self, slot: int) -> None:
        self._arrivals += 1
        self.order[slot] = self._arrivals
        self.active[slot] = True

    def _admit(self) -> None:
        """Swapped requests resume before new ones start. FIFO: the head of a queue waits for pages, and nobody passes it."""
        memory = self.memory
        memory.resume(idle=not self.active.any() and not len(memory.transfers))
        self._settle()
        while self.waiting and self._free and not memory.swapper.queue:
            request, slot = self.waiting[0], self._free[-1]
            placement = memory.place(slot, request, self.kv_policy.first_tokens(request))
            if placement is None:
                return
            self.waiting.popleft()
            self._free.pop()
            self._seat(request, slot, request.num_tokens)
            self._found(slot, placement.cached)
            if not placement.loading:
                self._arrive(slot)

    def _found(self, slot: int, tokens: int) -> None:
        """The KV of more tokens of a request was there already."""
        request = self._at(slot)
        self.computed[slot] += tokens
        self.sure[slot] = self.computed[slot]
        if request in self._lost:
            self.counters.num_recomputed_tokens -= min(tokens, self._lost[request])
        else:
            request.num_cached_tokens += tokens
            self.counters.num_cached_tokens += tokens

    def _seat(self, request: Request, slot: int, tokens: int) -> None:
        request.slot = slot
        self.requests[slot] = request
        self.length[slot], self.computed[slot], self.drafted[slot], self.proposed[slot], self.target[slot] = tokens, 0, 0, 0, 0
        traits = request.traits
        self.policy[slot], self.most[slot] = traits.policy, traits.k
        self.selects[slot], self.proposes[slot] = traits.selects, traits.proposes
        self.limit[slot] = request.limit
        self.selected[slot] = self.published[slot] = False
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
        """The next iteration, or None when nothing can run, or not before the steps under way are committed."""
        self.drain = False
        self.memory.poll()
        self._settle()
        self._admit()
        self.kv_policy.ahead(self)
        plan = self._plan()
        while plan is not None and not self.drain and (count := self.memory.hold(plan.slots, plan.starts + plan.rows)):
            if self.kv_policy.relieve(self, count):
                plan = self._plan()
            elif not self.drain:
                plan = self._affordable(plan)
        if plan is None or self.drain:
            return None
        self.now += 1
        self.counters.iterations += 1
        self.counters.gemm_rows += plan.num_rows
        if len(self.flights):
            waiting = np.flatnonzero(self.active & self.flights.held)
            self.counters.num_stalled_slots += len(waiting)
            self.phases.end(waiting)
        return plan

    def _plan(self) -> StepPlan | None:
        slots = np.flatnonzero(self.active & ~self.flights.held).astype(np.int32)
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
            collect &= self._draft_lengths(slots) > 0
        return StepPlan(slots, starts, rows, np.where(emit | sparse, drafted, 0).astype(np.int32), sparse, emit, collect,
                        self.flights.over[slots] > 0)

    def _affordable(self, plan: StepPlan) -> StepPlan | None:
        """The items for which there are pages, those longest on the device first; the others sit this iteration out."""
        missing = self.memory.missing(plan.slots, plan.starts + plan.rows)
        order = np.argsort(self.order[plan.slots])
        kept = np.zeros(plan.num_items, bool)
        kept[order] = (np.cumsum(missing[order]) <= self.memory.num_free) | (missing[order] == 0)
        self.counters.num_stalled_rows += int(plan.rows[~kept].sum())
        return plan.take(kept) if kept.any() else None

    def launch(self, plan: StepPlan) -> None:
        """The device was given the plan: take in what is sure of it, so that the next one can be made before its result is known.

        Drafts and prefill chunks go on. Whoever gets tokens waits for them, or, if `assumes`, goes on as if all drafts were
        accepted, the most that pages and limits must allow for; `commit` corrects it. Proposals always wait to be checked.
        """
        flights, emitting, drafting = self.flights, plan.slots[plan.emit], plan.slots[:plan.num_sparse]
        flights.start(plan)
        self.selected[emitting] = plan.collect[plan.emit]
        flights.held[emitting] = True
        proposing = self.proposes[drafting]
        if proposing.any():
            flights.held[drafting[proposing]] = True
            drafting = drafting[~proposing]
        self.drafted[drafting] += 1
        partial = plan.partial
        self.computed[plan.slots[partial]] += plan.rows[partial]
        if self.assumes:
            ahead = ~self.proposes[emitting]
            going, most = emitting[ahead], plan.drafted[plan.emit][ahead] + 1
            flights.assume(going, most)
            self.length[going] += most
            self.computed[going] = self.length[going] - 1
            self.drafted[going] = 0
            self._begin_rounds(going)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Commit]:
        """Take a step's results into the state: the one place where tokens and KV become committed. Results of requests that
        have left are dropped. A plan that was not launched is so now."""
        if not self.flights.knows(plan):
            self.launch(plan)
        for slot in self.flights.land(plan):
            self._vacate(slot)
        self._buffer(plan.slots[:plan.num_sparse], result)
        partial = plan.partial
        self.sure[plan.slots[partial]] = plan.starts[partial] + plan.rows[partial]
        live = self.active[plan.slots[result.items]]
        return self._verified(plan, result if live.all() else result.take(live)) if live.any() else []

    def _verified(self, plan: StepPlan, result: StepResult) -> list[Commit]:
        slots, drafted, flights = plan.slots[result.items], plan.drafted[result.items], self.flights
        waited = flights.held[slots]
        assumed = np.where(waited, 0, drafted + 1)
        length = self.length[slots] - flights.over[slots]
        counts, ended, stopped = cut(result, length, self.limit[slots], self.min_length[slots], self.stop_ids[slots])
        accepted = np.minimum(result.num_tokens - 1 + result.bad, counts)
        ended |= stopped
        bad = result.bad & ~ended
        self.counters.count(drafted, accepted, int(counts.sum()))
        flights.settle(slots, assumed)
        self.length[slots] += counts - assumed
        self.computed[slots] = self.length[slots] - 1
        self.sure[slots] = length + counts - 1
        self.drafted[slots[waited]] = 0
        commits = self._commits(slots, result, counts, drafted, accepted, ended, stopped, bad)
        self._go_on(slots, waited, ~ended & ~bad)
        return commits

    def _commits(self, slots: np.ndarray, result: StepResult, counts: np.ndarray, drafted: np.ndarray, accepted: np.ndarray,
                 ended: np.ndarray, stopped: np.ndarray, bad: np.ndarray) -> list[Commit]:
        """Give the requests in slots [n] their new tokens. ended: by a limit or, where `stopped`, by a stop id."""
        requests = [self._at(slot) for slot in slots.tolist()]
        rows = zip(result.tokens.tolist(), counts.tolist(), strict=True)
        tokens = [row if count == len(row) else row[:count] for row, count in rows]
        for request, new in zip(requests, tokens, strict=True):
            request.output_token_ids += new
        reasons = [_REASONS[i] for i in (ended.astype(np.int8) + stopped).tolist()]
        stop_tokens = [new[-1] if stop else None for new, stop in zip(tokens, stopped.tolist(), strict=True)]
        return list(map(Commit, requests, result.items.tolist(), tokens, drafted.tolist(), accepted.tolist(), reasons,
                        stop_tokens, bad.tolist()))

    def _go_on(self, slots: np.ndarray, waited: np.ndarray, alive: np.ndarray) -> None:
        """Those requests in slots [n] that go on, and waited for it, begin their next rounds."""
        for slot in slots[alive & ~self.published[slots]].tolist():
            self._publish(slot, self._at(slot))
        slots = slots[alive & waited]
        self._begin_rounds(slots)
        begun = slots[self.proposes[slots] & (self.target[slots] > 0)]
        if len(begun):
            self.wants_proposals = np.concatenate([self.wants_proposals, begun.astype(np.int32)])

    def _buffer(self, slots: np.ndarray, result: StepResult) -> None:
        """Count the sparse items in slots [n], and enter what those with a proposer drafted."""
        self.wants_proposals = np.zeros(0, np.int32)
        self.counters.num_draft_passes += len(slots)
        if (checked := self.proposes[slots] & self.active[slots]).any():
            slots = slots[checked]
            self.drafted[slots] += 1 if result.draft_counts is None else result.draft_counts[checked]
            self.proposed[slots] = 0
            self.flights.held[slots] = False
            self.phases.due(self.now, slots[self.drafted[slots] >= self.target[slots]])
            self.wants_proposals = slots[self.target[slots] - self.drafted[slots] > 1]

    def stop_drafting(self, slots: np.ndarray) -> None:
        """Verify what `slots` drafted so far in the next iteration."""
        self.target[slots] = self.drafted[slots]
        self.phases.due(self.now, slots)

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

    def _publish(self, slot: int, request: Request) -> None:
        """A request's prompt is computed: others may share it."""
        self.published[slot] = True
        self._lost.pop(request, None)
        self.memory.prefixes.publish(slot, request, int(self.sure[slot]))

    def _begin_rounds(self, slots: np.ndarray) -> None:
        room = self.limit[slots] - self.length[slots] - 1
        most = np.minimum(np.minimum(self._draft_lengths(slots), self.most[slots]), np.maximum(room, 0))
        selects = self.selects[slots]
        direct, drafting = slots[~selects], slots[selects]
        if len(direct):  # first: they leave no choice
            self.phases.due(self.now, direct)
            self.target[direct] = most[~selects] * self.proposes[direct]
        if len(drafting):
            self.target[drafting] = self.phases.begin(self.now, drafting, most[selects] * self.selected[drafting])

    def _draft_lengths(self, slots: np.ndarray) -> np.ndarray:
        """k that rounds of slots [n] begin with now."""
        policy = self.policy[slots]
        return np.array([self.draft_length(p) for p in range(int(policy.max(initial=0)) + 1)])[policy]

    def check(self) -> None:
        """Integrity of slots and pages. Raises RuntimeError."""
        self.memory.check()
        for slot, request in enumerate(self.requests):
            if request is None and slot not in self.flights.left and (self.active[slot] or self.memory.pages.counts[slot]):
                raise RuntimeError(f"slot {slot} is out of step with its request")
