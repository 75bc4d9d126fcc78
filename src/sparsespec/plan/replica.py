"""One replica of the fluid engine: all running requests gain tokens at one common rate, until something happens.

`clock` counts the tokens that a request which ran from the start would have. So a request that begins at clock c with n tokens to
go ends at c + n whatever the pace, ends are a heap, and the KV in use is `offset + running · clock`. Events: the next end, and
the pool running full. Between two events a token's cost is linear in the clock, up to the bend of the bandwidth curve.

Copies run beside the steps, one after the other in each direction. A resumed request gains tokens from the end of its copy on.
The engine stands still only where it needs a copy's pages that is still queued behind another one.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from sparsespec.core.errors import CapacityError
from sparsespec.plan.rounds import Rounds
from sparsespec.plan.workload import Load

_EPS = 1e-6
NEVER = math.inf


@dataclass
class Meter:
    """Integrals over ms of simulated time. The loaded ones count while requests wait, once the pool has kept one waiting."""

    busy: float = 0.0
    loaded: float = 0.0
    kv: float = 0.0
    running: float = 0.0
    kv_loaded: float = 0.0
    iterations: float = 0.0
    iterations_loaded: float = 0.0
    rows: float = 0.0  # summed over iterations
    rows_variance: float = 0.0
    rows_loaded: float = 0.0
    rows_variance_loaded: float = 0.0
    slot_iterations: float = 0.0
    prefill_tokens: int = 0
    preemptions: int = 0
    recomputed: int = 0
    offloaded: int = 0
    restored: int = 0
    transfer_ms: float = 0.0
    transfer_wait: float = 0.0


class Replica:
    """State of one copy of the model. Times in ms; `finished[i]` is set when request i ends."""

    def __init__(self, load: Lengths, rounds: Rounds, capacity: int, slots: int, policy: str, reserve_tokens: int | None,
                 finished: list[float]) -> None:
        self.prompts, self.outputs = load.prompts, load.outputs
        self.rounds, self.capacity, self.slots, self.policy = rounds, capacity, slots, policy
        self.reserve_tokens, self.finished = reserve_tokens, finished
        self.now = self.clock = self.offset = 0.0
        self.reserved = 0
        self.running: OrderedDict[int, float] = OrderedDict()  # request → clock at which it had no output, by admission
        self.ends: list[tuple[float, int, float]] = []  # (clock, request, base); stale where the request has another base now
        self.waiting: deque[int] = deque()
        self.swapped: deque[int] = deque()
        self.generated: dict[int, float] = {}  # of requests that wait with output: swapped, or to be computed again
        self.slack = 0.0  # tokens of room that a swap made for the growth of those who stayed
        self.held = 0.0  # KV tokens of waiting and swapped requests
        self.blocked = False  # the pool has kept somebody waiting since the queue was last empty
        self.copied_out = self.copied_in = 0.0  # when the last copy ends
        self._until = self._cost = self._cost_end = 0.0  # the next event's clock; ms a token now and then
        self.meter = Meter()

    @property
    def kv(self) -> float:
        """Tokens of KV in the pool."""
        return self.offset + len(self.running) * self.clock

    @property
    def requests(self) -> int:
        """Requests here, in whatever state."""
        return len(self.running) + len(self.waiting) + len(self.swapped)

    @property
    def load(self) -> float:
        """KV tokens of all requests here: what a router can know of the work to come."""
        return self.kv + self.held

    def next_event(self) -> float:
        """When something happens next, in ms."""
        if not self.running:
            return NEVER
        self._aim()
        return self.now + (self._until - self.clock) * (self._cost + self._cost_end) / 2

    def _aim(self) -> None:
        """Find the clock of the next event, and a token's cost now and then."""
        ends, running = self.ends, self.running
        while running.get(ends[0][1]) != ends[0][2]:
            heapq.heappop(ends)
        until, n = ends[0][0], len(running)
        if self.policy != "reserve":
            until = min(until, (self.capacity - self.offset) / n)
        self._until = max(until, self.clock)
        tokens = self.rounds.tokens
        self._cost = self.rounds.round_ms(n, self.kv) / tokens
        self._cost_end = self.rounds.round_ms(n, self.offset + n * self._until) / tokens

    def fire(self) -> None:
        """Go to the next event and let it happen."""
        step = self._until - self.clock
        self._move(step, step * (self._cost + self._cost_end) / 2)
        full = self.policy != "reserve" and self.capacity - self.kv < _EPS * self.capacity
        done = self._finish()
        if full and not done:
            self._preempt()  # and nobody takes the room: those that run are to grow into it
        else:
            self._admit()

    def arrive(self, request: int, when: float) -> bool:
        """A request comes at `when` ms, before the next event. False: it queues, and the next event stays."""
        queued = bool(self.waiting or self.swapped)
        self._check(request)
        self.waiting.append(request)
        self.held += self.prompts[request]
        if queued or len(self.running) == self.slots:
            return False
        if self.running:
            self._advance(when)
        else:
            self.now = max(self.now, when)
        self._admit()
        return True

    def _check(self, request: int) -> None:
        most = self.prompts[request] + max(self.outputs[request], self.reserve_tokens or 0)
        if most > self.capacity:
            raise CapacityError("kv_cache_tokens", self.capacity, f"request {request} needs {most} tokens of KV",
                                "Give a larger pool, or lower max_output_len")

    def _advance(self, when: float) -> None:
        """Run to `when`, which no event comes before."""
        left = when - self.now
        if left <= 0:
            return
        span = self._until - self.clock
        slope = (self._cost_end - self._cost) / span if span > 0 else 0.0
        step = 2 * left / (self._cost + math.sqrt(max(self._cost**2 + 2 * slope * left, 0.0)))
        self._move(min(step, span), left)

    def _move(self, step: float, ms: float) -> None:
        """Let `step` tokens a request pass in `ms`."""
        m, n = self.meter, len(self.running)
        middle = self.kv + n * step / 2
        iterations = step * self.rounds.iterations / self.rounds.tokens
        rows, variance = self.rounds.rows(n)
        m.busy += ms
        m.kv += middle * ms
        m.running += n * ms
        m.iterations += iterations
        m.slot_iterations += n * iterations
        m.rows += rows * iterations
        m.rows_variance += variance * iterations
        if self.blocked and (self.waiting or self.swapped):
            m.loaded += ms
            m.kv_loaded += middle * ms
            m.iterations_loaded += iterations
            m.rows_loaded += rows * iterations
            m.rows_variance_loaded += variance * iterations
        self.slack = max(0.0, self.slack - n * step)
        self.clock += step
        self.now += ms

    def _finish(self) -> bool:
        """End the requests whose output is complete."""
        ends, running, done = self.ends, self.running, False
        while ends and ends[0][0] <= self.clock + _EPS:
            _, request, base = heapq.heappop(ends)
            if running.get(request) == base:
                del running[request]
                self.offset -= self.prompts[request] - base
                self.reserved -= self._reserve(request)
                self.finished[request] = self.now
                done = True
        return done

    def _reserve(self, request: int) -> int:
        return self.prompts[request] + (self.outputs[request] if self.reserve_tokens is None else
                                        max(self.reserve_tokens, self.outputs[request]))

    def _preempt(self) -> None:
        """The pool is full: the first that was admitted goes to the host, or the last begins again later."""
        m = self.meter
        self.blocked = True
        request, base = self.running.popitem(last=self.policy == "recompute")
        prompt, generated = self.prompts[request], max(0.0, self.clock - base)
        self.offset -= prompt - base
        self.reserved -= self._reserve(request)
        self.generated[request] = generated
        self.held += prompt + generated
        m.preemptions += 1
        if self.policy == "recompute":
            m.recomputed += int(prompt + generated)
            self.waiting.appendleft(request)
        else:
            m.offloaded += int(prompt + generated)
            wait = max(0.0, self.copied_out - self.now)
            m.transfer_wait += wait
            self._stand(wait)
            self.slack += prompt + generated
            self.copied_out = self.now + self._transfer(tokens=prompt + generated)
            self.swapped.append(request)

    def _transfer(self, tokens: float) -> float:
        ms = self.rounds.costs.transfer(tokens)
        self.meter.transfer_ms += ms
        return ms

    def _stand(self, ms: float) -> None:
        """Time passes in which no request gains tokens."""
        m = self.meter
        m.busy += ms
        m.kv += self.kv * ms
        m.running += len(self.running) * ms
        if self.blocked and (self.waiting or self.swapped):
            m.loaded += ms
            m.kv_loaded += self.kv * ms
        self.now += ms

    def _admit(self) -> None:
        """First in, first out; swapped requests before new ones, and nobody passes the head."""
        while len(self.running) < self.slots:
            queue = self.swapped or self.waiting
            if not queue:
                self.blocked = False
                return
            request = queue[0]
            generated = self.generated.get(request, 0.0)
            tokens = self.prompts[request] + generated
            if self.policy == "reserve":
                fits = self.reserved + self._reserve(request) <= self.capacity
            elif queue is self.swapped and self.running:
                fits = self.kv + tokens + self.rounds.k + 1 + self.slack <= self.capacity
            else:
                fits = self.kv + tokens + 1 <= self.capacity
            if not fits:
                self.blocked = True
                return
            queue.popleft()
            self._seat(request, tokens, generated, queue is self.swapped)

    def _seat(self, request: int, tokens: float, generated: float, from_host: bool) -> None:
        m = self.meter
        self.held -= tokens
        self.generated.pop(request, None)
        late = 0.0  # tokens that the others gain before its copy ends
        if from_host:
            m.restored += int(tokens)
            self.copied_in = max(self.copied_in, self.now) + self._transfer(tokens)
            if self.running:
                late = (self.copied_in - self.now) / self._cost
            else:
                self._stand(self.copied_in - self.now)
        else:
            m.prefill_tokens += int(tokens)
            self._stand(self.rounds.prefill_ms(len(self.running), tokens))
        base = self.clock + late - generated
        self.running[request] = base
        heapq.heappush(self.ends, (base + self.outputs[request], request, base))
        self.offset += self.prompts[request] - base
        self.reserved += self._reserve(request)


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompt and output as lists, which single look-ups are faster in."""

    prompts: list[int]
    outputs: list[int]

    @classmethod
    def of(cls, load: Load) -> Lengths:
        return cls(load.prompts.tolist(), load.outputs.tolist())
