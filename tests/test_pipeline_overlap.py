"""What overlaps in the verification modes, and what happens when a step fails.

That the CPU's work overlaps with the device's is shown on a clock that is only counted, so that the figures are exact.
"""

from __future__ import annotations

import queue
import time
from typing import Any

import numpy as np
import pytest

from driving import assert_idle
from sparsespec import LLM, RequestOutput
from sparsespec.engine.loop import EngineLoop
from sparsespec.testing import timed_device
from test_pipeline import LATE, MODES, Case, Models, engine, greedy

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("mode", LATE)
def test_stall_is_one_step_of_a_round_or_none(mode: str, tiny_models: Models) -> None:
    """12 requests that never stop, each alone in its bucket: of their steps, 1 in k + 2 is sat out, or none."""
    k = 4
    llm = engine(tiny_models["llama"], mode, k, 1.0, max_num_seqs=12)
    for i in range(12):
        llm.engine.add_request(str(i), [i + 1, 2, 3], greedy(max_tokens=240, ignore_eos=True))
    for _ in range(30):
        llm.engine.step()
    before, steps = llm.stats(), 60
    for _ in range(steps):
        llm.engine.step()
    after = llm.stats()
    assert after["iterations"] - before["iterations"] == steps
    share = (after["num_stalled_slots"] - before["num_stalled_slots"]) / (12 * steps)
    assert share == (pytest.approx(1 / (k + 2), abs=0.01) if mode == "delayed" else 0)
    for i in range(12):
        llm.engine.abort(str(i))


def several_steps(llm: LLM, count: int) -> None:
    for _ in range(count):
        llm.engine.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_step_is_raised(mode: str, tiny_models: Models) -> None:
    llm = engine(tiny_models["llama"], mode)
    execute, count = llm.engine.runner.execute, 0

    def fail(plan: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            raise RuntimeError("made to fail")
        return execute(plan)

    llm.engine.runner.execute = fail  # type: ignore[method-assign]
    for i in range(4):
        llm.engine.add_request(str(i), [1, 2, i], greedy(max_tokens=40))
    with pytest.raises(RuntimeError, match="made to fail"):
        several_steps(llm, 10)
    assert count == 5  # nothing runs after it


@pytest.mark.parametrize("mode", MODES)
def test_the_loop_survives_a_failed_step(mode: str, tiny_models: Models, tiny_cases: dict[str, list[Case]]) -> None:
    """The engine is set up anew once, and its successor serves as before."""
    prompt, ids = tiny_cases["llama"][0]

    class Ear:
        def __init__(self) -> None:
            self.crashes: list[tuple[str, bool]] = []
            self.done: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()

        def on_outputs(self, outputs: list[RequestOutput]) -> None:
            for o in outputs:
                self.done.put(o)

        def on_crash(self, error: BaseException, alive: bool) -> None:
            self.crashes.append((str(error), alive))

    def fail(plan: Any) -> Any:
        raise RuntimeError("made to fail")

    ear = Ear()
    first = engine(tiny_models["llama"], mode).engine
    loop = EngineLoop(first, lambda: engine(tiny_models["llama"], mode).engine, ear)
    loop.start()
    loop.submit(lambda e: e.add_request("a", prompt, greedy(max_tokens=30))).result(10)
    assert ear.done.get(timeout=20).outputs[0].token_ids == ids[:30]
    first.runner.execute = fail  # type: ignore[method-assign]
    loop.submit(lambda e: e.add_request("b", prompt, greedy(max_tokens=30)))
    loop.submit(lambda e: e.add_request("c", prompt, greedy(max_tokens=30)))
    for _ in range(200):
        if loop.restarts:
            break
        time.sleep(0.05)
    assert ear.crashes == [("made to fail", True)]
    loop.submit(lambda e: e.add_request("d", prompt, greedy(max_tokens=30))).result(10)
    assert ear.done.get(timeout=20).outputs[0].token_ids == ids[:30]
    loop.stop(10)


@pytest.mark.parametrize(("step", "commit"), [(7.0, 3.0), (3.0, 7.0), (5.0, 5.0)])
@pytest.mark.parametrize("mode", MODES)
def test_overlap(mode: str, step: float, commit: float, tiny_models: Models) -> None:
    """An iteration takes D + C without overlap, and the longer of the two with it."""
    llm = engine(tiny_models["llama"], mode, 4, 1.0, max_num_seqs=12)
    with timed_device(llm, step=step, commit=commit) as clock:
        for i in range(12):
            llm.engine.add_request(str(i), [i + 1, 2, 3], greedy(max_tokens=150, ignore_eos=True))
        for _ in range(20):
            llm.engine.step()
        times = [clock.now]
        for _ in range(30):
            llm.engine.step()
            times.append(clock.now)
        assert set(np.diff(times).tolist()) == {step + commit if mode == "sync" else max(step, commit)}
        while llm.engine.has_work():
            llm.engine.step()
    assert_idle(llm)
