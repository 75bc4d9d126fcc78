"""The engine behind an event loop: increments, slow readers, refusals, aborts, draining; and what is counted and logged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from serving import engine_config, offline, tiny_loaded
from sparsespec import SamplingParams
from sparsespec.core.errors import ContextLengthError, InvalidValueError, OverloadedError, UnavailableError
from sparsespec.core.outputs import CompletionOutput, RequestOutput
from sparsespec.engine.async_engine import AsyncEngine, Submission
from sparsespec.engine.engine import Engine
from sparsespec.engine.streams import OutputStream
from sparsespec.metrics.log_line import LogLine
from sparsespec.metrics.rows import PhaseRows

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0, max_tokens=60)


@asynccontextmanager
async def engine(max_waiting: int = 8, **settings: Any) -> AsyncIterator[AsyncEngine]:
    front = AsyncEngine(Engine(engine_config(**settings), tiny_loaded()), max_waiting=max_waiting)
    front.start()
    try:
        yield front
    finally:
        await front.close()
    assert front.status == "dead"


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def submission(name: str, params: SamplingParams = GREEDY, length: int = 3) -> Submission:
    return Submission(name, {"prompt_token_ids": list(range(65, 65 + length))}, params)


def test_increments_joined_are_the_output() -> None:
    """Also for a reader that looks only now and then: what it missed comes merged, and no more than that is kept."""
    params = SamplingParams(n=2, seed=3, max_tokens=60, logprobs=1, stop=["\x00\x00"])
    expected = offline().generate({"prompt_token_ids": [65, 66, 67]}, params, use_tqdm=False)[0].outputs

    async def read(pause: float) -> tuple[list[CompletionOutput], int]:
        found, batches = [CompletionOutput(i, logprobs=[]) for i in range(2)], 0
        async with engine() as front, await front.submit([submission("a", params)], stream=True) as outputs:
            async for batch in outputs:
                batches += 1
                for c in batch[0].outputs:
                    mine = found[c.index]
                    mine.text += c.text
                    mine.token_ids += c.token_ids
                    mine.logprobs += c.logprobs  # type: ignore[operator]
                    mine.cumulative_logprob, mine.finish_reason = c.cumulative_logprob, c.finish_reason
                    mine.stop_reason = c.stop_reason
                await asyncio.sleep(pause)
        return found, batches

    prompt, slow = run(read(0)), run(read(0.15))
    assert prompt[0] == slow[0] == expected
    assert slow[1] < prompt[1]


def test_several_prompts_in_one_stream() -> None:
    async def read() -> dict[str, str]:
        texts: dict[str, str] = {}
        async with engine() as front:
            async with await front.submit([submission("a"), submission("b", length=5)], stream=False) as outputs:
                async for batch in outputs:
                    texts |= {o.request_id: o.outputs[0].text for o in batch}
            assert front.num_pending == 0
        return texts

    outputs = offline().generate([list(range(65, 68)), list(range(65, 70))], GREEDY, use_tqdm=False)
    assert run(read()) == dict(zip("ab", (o.outputs[0].text for o in outputs), strict=True))


def test_refusals_leave_nothing_behind() -> None:
    async def refused() -> None:
        async with engine(max_waiting=0, max_num_seqs=4) as front:
            with pytest.raises(ContextLengthError):  # one of two: neither is queued
                await front.submit([submission("a"), Submission("b", {"prompt_token_ids": [1] * 600}, GREEDY)], stream=True)
            with pytest.raises(InvalidValueError, match="request_id"):
                await front.submit([submission("a"), submission("a")], stream=True)
            with pytest.raises(InvalidValueError, match="more completions"):
                await front.submit([submission("a", SamplingParams(n=5))], stream=True)
            assert front.num_pending == 0
            async with await front.submit([submission("a", SamplingParams(n=3, max_tokens=400))], stream=True):
                with pytest.raises(OverloadedError) as error:
                    await front.submit([submission("b", SamplingParams(n=2))], stream=True)
                assert error.value.retry_after == 1
                async with await front.submit([submission("c")], stream=True) as outputs:
                    assert [b async for b in outputs][-1][0].finished
            assert front.num_pending == 0
            await front.call(lambda e: None)  # the abort of what was left came before this
            await asyncio.sleep(0.1)
            s = front.stats()
            assert (s["running"], s["waiting"], s["device_pages_free"]) == (0, 0, s["device_pages_total"])

    run(refused())


def test_abort_and_drain() -> None:
    long = SamplingParams(temperature=0, max_tokens=500)

    async def ends() -> None:
        async with engine() as front:
            assert not await front.abort("nobody")
            streams = {i: await front.submit([submission(i, long)], stream=i != "whole") for i in ("gone", "stays", "whole")}
            reads = {i: asyncio.create_task(_all(s)) for i, s in streams.items()}
            while front.stats()["num_emitted_tokens"] < 30:
                await asyncio.sleep(0.001)
            assert await front.abort("gone", "because")
            gone = await reads["gone"]
            assert (gone[-1].outputs[-1].finish_reason, gone[-1].outputs[-1].stop_reason) == ("abort", "because")
            draining = asyncio.create_task(front.drain(0.05))
            await asyncio.sleep(0)
            with pytest.raises(UnavailableError):
                await front.submit([submission("late")], stream=True)
            assert front.status == "draining"
            await draining
            for name in ("stays", "whole"):
                last = (await reads[name])[-1].outputs[0]
                assert (last.finish_reason, last.stop_reason) == ("abort", "shutdown")
            assert 0 < len((await reads["whole"])[-1].outputs[0].token_ids) < 500
            assert front.num_pending == 0

    run(ends())


async def _all(stream: OutputStream) -> list[RequestOutput]:
    return [output async for batch in stream for output in batch]


def test_commands_that_fail_are_their_callers_business() -> None:
    def broken(_: Engine) -> None:
        raise ZeroDivisionError

    async def call() -> None:
        async with engine() as front:
            with pytest.raises(ZeroDivisionError):
                await front.call(broken)
            assert front.status == "ok"
            assert await front.call(lambda e: e.max_model_len) == 512
        with pytest.raises(UnavailableError):
            await front.call(broken)

    run(call())


def test_rows_by_phase() -> None:
    rows = PhaseRows()

    def plan(*items: tuple[int, int, bool, bool]) -> Any:
        """What is counted of a plan. items: (rows, drafted, sparse, emit)."""
        names = ("rows", "drafted", "sparse", "emit")
        return SimpleNamespace(**{name: np.array(column) for name, column in zip(names, zip(*items, strict=True), strict=True)})

    rows.count(plan((1, 2, True, False), (1, 0, True, False), (5, 4, False, True), (1, 0, False, True), (32, 0, False, False),
                    (7, 0, False, True)))
    assert rows.stats()["last_rows_by_phase"] == {"prefill": 39, "draft": 2, "verify": 5, "decode": 1}
    rows.count(plan((1, 0, False, True)))
    assert rows.stats() == {"rows_by_phase": {"prefill": 39, "draft": 2, "verify": 5, "decode": 2},
                            "last_rows_by_phase": {"prefill": 0, "draft": 0, "verify": 0, "decode": 1}}


def test_log_line() -> None:
    llm = offline()
    line = LogLine(llm.stats)
    assert line.next() is None
    llm.generate("abc", GREEDY, use_tqdm=False)
    text = line.next() or ""
    for part in ("generation: ", "running: 0", "KV pool: 0.0%", "rows: prefill 3 ", f"of {llm.stats()['num_draft_tokens']} drafts"):
        assert part in text
    assert line.next() is not None  # the first idle one says so
    assert line.next() is None
