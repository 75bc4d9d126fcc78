"""Drives an engine step by step, as a server would: requests arrive while others run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparsespec import LLM, CompletionOutput, RequestOutput, SamplingParams
from sparsespec.testing import check_integrity


def speculate(k: int, ratio: float = 0.05, **settings: Any) -> dict[str, Any]:
    """A speculative_config that always drafts, with views small enough for short contexts; k = 0: plain decoding."""
    if k == 0:
        return {"method": "none"}
    return {"num_speculative_tokens": k, "sparse_attn_ratio": ratio, "min_budget": 8, "adaptive": False, **settings}


def serve(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams],
          arrivals: Sequence[int] | None = None, after_step: Callable[[LLM], object] | None = None) -> list[RequestOutput]:
    """Outputs in order; prompt i arrives at step arrivals[i] (None: all at 0). The KV pools are checked after every step.

    Afterwards nothing may be left in the engine.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    when = arrivals or [0] * len(prompts)
    done: dict[str, RequestOutput] = {}
    now = 0
    while len(done) < len(prompts):
        for i, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
            if when[i] == now:
                llm.engine.add_request(f"serve-{i}", prompt, p)
        done.update((o.request_id, o) for o in llm.engine.step())
        check_integrity(llm)
        if after_step is not None:
            after_step(llm)
        now += 1
        assert now < 100_000, "the engine makes no progress"
    llm.engine.settle()
    assert_idle(llm)
    return [done[f"serve-{i}"] for i in range(len(prompts))]


def assert_idle(llm: LLM) -> None:
    """All slots and pages are free, those of both pools; cached prefixes count as free."""
    memory = llm.engine.scheduler.memory
    for _ in range(100):  # copies for requests that are gone may still be on their way
        if not len(memory.transfers):
            break
        memory.poll()
    s = llm.stats()
    assert (s["running"], s["waiting"], s["swapped"]) == (0, 0, 0)
    assert s["device_pages_free"] == s["device_pages_total"]
    assert s["host_pages_free"] == s["host_pages_total"]
    check_integrity(llm)


def completions(outputs: Sequence[RequestOutput]) -> list[CompletionOutput]:
    """The first completion of each."""
    return [o.outputs[0] for o in outputs]


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Ids of the first completion of each."""
    return [c.token_ids for c in completions(outputs)]
