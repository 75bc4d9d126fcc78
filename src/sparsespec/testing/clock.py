"""A device whose steps take a given time, on a clock that is only counted: what overlaps with what, told exactly.

    with timed_device(llm, step=7.0, commit=3.0) as clock:
        while llm.engine.has_work():
            llm.engine.step()
            print(clock.now, clock.waited)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from sparsespec.core.plan import StepPlan, StepResult
from sparsespec.engine.engine import Engine
from sparsespec.engine.pipeline import Job
from sparsespec.llm import LLM
from sparsespec.scheduler.outcome import Commit


@dataclass
class Clock:
    """now: the CPU's time. free: when the device will have done all that it was given. waited: what the CPU waited for it."""

    now: float = 0.0
    free: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True)
class _Timed:
    """A job's result, and when it is there."""

    clock: Clock
    at: float
    value: Any

    def result(self) -> Any:
        self.clock.waited += max(0.0, self.at - self.clock.now)
        self.clock.now = max(self.clock.now, self.at)
        return self.value


class _Device:
    """A worker that computes at once and says when it would have been done."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.busy = clock, 0.0

    def submit(self, job: Callable[[], Any]) -> Job:
        self.busy = 0.0
        value = job()
        self.clock.free = max(self.clock.now, self.clock.free) + self.busy
        return _Timed(self.clock, self.clock.free, value)

    def close(self) -> None:
        """Nothing runs."""


@contextmanager
def timed_device(llm: LLM | Engine, *, step: float, commit: float) -> Iterator[Clock]:
    """While open, each step takes the device `step` and each commit the CPU `commit`; all else takes no time.

    To be opened while nothing runs. The results are those of the engine's own model.
    """
    engine = llm.engine if isinstance(llm, LLM) else llm
    clock = Clock()
    device = _Device(clock)
    execute, take = engine.runner.execute, engine.scheduler.commit

    def timed_execute(plan: StepPlan) -> StepResult:
        device.busy += step
        return execute(plan)

    def timed_commit(plan: StepPlan, result: StepResult) -> list[Commit]:
        clock.now += commit
        return take(plan, result)

    with (mock.patch.object(engine.pipeline, "worker", device), mock.patch.object(engine.runner, "execute", timed_execute),
          mock.patch.object(engine.scheduler, "commit", timed_commit)):
        yield clock
