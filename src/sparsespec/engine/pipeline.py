"""How steps run beside the CPU's work: one after the other, or one ahead (`speculative_config.verification`).

- sync: a step's result is committed before the next one is planned. The device waits while the CPU works.
- delayed: while the CPU commits step i, the device runs step i + 1, without the requests that step i verified: their
  results are not known yet. They sit one step of k + 2 out (SparseSpec, section 4.3). Drafts and prefill chunks go on.
- device: nobody sits out. Step i + 1 is planned as if step i accepted all drafts, and the runner, which knows better by
  then, moves its rows back (ModelRunner.resolve).

The device's side (the runner, and all that it changes) belongs to one worker, which runs its jobs in the order in which
they were given: a step together with the requests that arrive and leave before it, proposals, measurements. The scheduler
decides who may be in a step (scheduler.launch); here is only how many steps are under way, and in what order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from sparsespec.core.errors import StateError
from sparsespec.core.plan import StepPlan, StepResult
from sparsespec.core.request import Request
from sparsespec.runner.model_runner import ModelRunner


@dataclass(frozen=True)
class Arrival:
    """A request that takes a slot, with the tokens that it has: as of now, for it may be aborted before the worker seats it."""

    request: Request
    slot: int
    ids: list[int]


@dataclass(frozen=True)
class Step:
    """A plan that ran, and the seconds that this took."""

    plan: StepPlan
    result: StepResult
    seconds: float


class Job(Protocol):
    """Something that a worker was given."""

    def result(self) -> Any:
        """Wait for it; raises what it raised."""
        ...


class Worker(Protocol):
    """Runs jobs in the order in which they are given."""

    def submit(self, job: Callable[[], Any]) -> Job: ...

    def close(self) -> None:
        """Wait for the job that runs, and run no other."""
        ...


@dataclass(frozen=True)
class _Asked:
    """A job that runs when its result is asked for."""

    result: Callable[[], Any]


class Inline:
    """Runs jobs in the caller's thread, when it waits for them."""

    def submit(self, job: Callable[[], Any]) -> Job:
        return _Asked(job)

    def close(self) -> None:
        """Nothing runs."""


class Threaded:
    """Runs jobs in one thread: PyTorch lets others work while it computes. After a failure it runs nothing any more."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "sparsespec-device")
        self._failed = False

    def submit(self, job: Callable[[], Any]) -> Job:
        return self._pool.submit(self._guarded, job)

    def close(self) -> None:
        self._failed = True
        self._pool.shutdown()

    def _guarded(self, job: Callable[[], Any]) -> Any:
        if self._failed:
            raise StateError("step", "not run", "the one before it failed", "Set up the engine anew")
        try:
            return job()
        except BaseException:
            self._failed = True
            raise


class Pipeline:
    """See the module. depth: steps that may be under way when the next one is planned."""

    def __init__(self, runner: ModelRunner, verification: str) -> None:
        self.runner = runner
        self.depth = 0 if verification == "sync" else 1
        self.worker: Worker = Threaded() if self.depth else Inline()
        self._flight: deque[tuple[StepPlan, Job]] = deque()

    def __len__(self) -> int:
        return len(self._flight)

    def submit(self, plan: StepPlan, leaving: Sequence[int], arriving: Sequence[Arrival]) -> None:
        """Run a step after those under way, once the slots `leaving` are cleared and the requests `arriving` seated."""
        self._flight.append((plan, self.worker.submit(partial(self._step, plan, tuple(leaving), tuple(arriving)))))

    def collect(self, *, drain: bool = False) -> Step | None:
        """The oldest step's result, if more than `depth` are under way or with `drain` any; waits for it. Raises what it raised."""
        if len(self._flight) <= (0 if drain else self.depth):
            return None
        plan, job = self._flight[0]
        result, seconds = job.result()
        self._flight.popleft()
        return Step(plan, result, seconds)

    def run(self, job: Callable[[], Any]) -> Any:
        """Do something else on the device's side, after the steps under way, and wait for it."""
        return self.worker.submit(job).result()

    def close(self) -> None:
        """The engine is given up: its memory is in use no more when this returns."""
        self.worker.close()

    def _step(self, plan: StepPlan, leaving: Sequence[int], arriving: Sequence[Arrival]) -> tuple[StepResult, float]:
        for slot in leaving:
            self.runner.leave(slot)
        for a in arriving:
            self.runner.seat(a.request, a.slot, a.ids)
        start = time.perf_counter()
        result = self.runner.execute(plan)
        return result, time.perf_counter() - start
