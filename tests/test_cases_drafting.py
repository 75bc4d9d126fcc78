"""Case T36: drafts that are always wrong are given up soon, and tried again rarely. Counted in passes, with a clock of the
test's own: a step takes what the cost model says of its rows and its KV, and nothing depends on the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sparsespec import LLM, SamplingParams
from sparsespec.core.plan import StepPlan
from sparsespec.spec import adaptive
from sparsespec.spec.cost import StepCosts
from sparsespec.testing import override_drafts, scripted

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH, PROMPT, TOKENS, VIEW = 32, 200, 300, 140


def clocked(method: str, attention: float) -> LLM:
    """An engine in which attention takes this share of a plain step at the prompt's length; k = 8, adaptive."""
    loaded = scripted(lambda token, position: position % 90, vocab_size=100)
    llm = LLM(loaded, kv_cache_tokens=BATCH * 640, max_model_len=600, max_num_seqs=BATCH, max_num_batched_tokens=8192,
              speculative_config={"method": method, "num_speculative_tokens": 8})
    controller: Any = llm.engine.controller
    products = 2.5e-5
    token = attention / (1 - attention) * products / (2 * BATCH * PROMPT)
    costs = StepCosts(2, (1, 64, 1024), (1.1e-5, 1.2e-5, 1e-4), (1e-6, 1e-6, 1e-5), (0.0, token, token / 100), (1e-6, token),
                      token / 10)
    controller._measure, controller._bytes = lambda: costs, (1.0, attention / (1 - attention) / (BATCH * PROMPT))
    observe = controller.observe

    def with_own_clock(plan: StepPlan, rounds: Sequence[tuple[int, int]], seconds: float) -> None:
        read = np.where(plan.sparse, VIEW * plan.rows, (plan.starts + plan.rows) * (1 + (plan.rows - 1) / 100 + plan.collect / 10))
        observe(plan, rounds, costs.products(plan.num_rows) + costs.layers * (token * float(read.sum()) + 1e-6 * plan.sparse.any()))

    controller.observe = with_own_clock
    return llm


@pytest.mark.parametrize(("method", "attention", "step"), [("pillar", 0.5, 0), ("pillar", 0.95, 0), ("ngram", 0.8, 0),
                                                           ("pillar", 0.999, 0), ("pillar", 0.999, 7), ("pillar", 0.95, 7)])
def test_t36_drafts_that_are_always_wrong(method: str, attention: float, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """step: how many tokens more than the last one each request writes, so that the batch changes all the time."""
    monkeypatch.setattr(adaptive, "_PROBE_AFTER", 64)  # instead of 1024 plain steps
    llm = clocked(method, attention)
    engine, lengths, rounds = llm.engine, [0], [0]
    rng = np.random.default_rng(0)
    with override_drafts(llm, lambda request_id, position: 99):
        for i in range(BATCH):
            params = SamplingParams(temperature=0, max_tokens=TOKENS - step * i)
            engine.add_request(str(i), rng.integers(0, 90, PROMPT).tolist(), params)
        while engine.has_work():
            for out in engine.step():
                assert out.outputs[0].token_ids == [p % 90 for p in range(PROMPT, PROMPT + TOKENS - step * int(out.request_id))]
            lengths.append(engine.controller.draft_length())
            rounds.append(engine.scheduler.counters.num_drafts)
    on = [i for i in range(1, len(lengths)) if lengths[i] and not lengths[i - 1]]
    off = [i for i in range(1, len(lengths)) if lengths[i - 1] and not lengths[i]]
    assert 1 <= len(on) <= 3  # at once, then after 64 and after 128 more plain steps
    assert len(off) == len(on)
    assert all(rounds[end] - rounds[start] <= BATCH for start, end in zip(on, off, strict=True))
    counters = engine.scheduler.counters
    assert counters.num_accepted_tokens == 0
    assert counters.num_emitted_tokens == sum(TOKENS - step * i for i in range(BATCH))
    assert counters.num_emitted_tokens / (counters.num_target_passes + counters.num_draft_passes) >= 0.95


def test_drafts_that_are_right_are_kept() -> None:
    """The same engine drafts to the end where that pays."""
    llm = clocked("pillar", 0.8)
    engine, lengths = llm.engine, list[int]()
    with override_drafts(llm, lambda request_id, position: position % 90):
        for i in range(BATCH):
            engine.add_request(str(i), [i] * PROMPT, SamplingParams(temperature=0, max_tokens=100))
        while engine.has_work():
            lengths.append(engine.controller.draft_length())
            engine.step()
    counters = engine.scheduler.counters
    assert min(lengths[10:]) > 0
    assert counters.num_accepted_tokens == counters.num_draft_tokens > 0.6 * BATCH * 100
