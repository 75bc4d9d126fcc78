"""Greedy output equals Hugging Face's, token for token, however it is speculated and batched: tiny llama, qwen2 and qwen3."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import numpy as np
import pytest

from driving import serve, speculate, token_ids
from reference import Reference, tiny_path
from sparsespec import LLM, SamplingParams
from sparsespec.loader.loaded import LoadedModel
from sparsespec.testing import force_preemption, poison_free_pages, running_requests, tiny_model

Cases = dict[str, list[tuple[list[int], list[int]]]]
pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ("llama", "qwen2", "qwen3")
DRAFTS, RATIOS = (1, 4, 8, 16), (0.05, 0.3, 1.0)
PAGES, SCHEDULES, BATCHES = (1, 16), ("unified", "lockstep"), (1, 3, 8)


def run_cell(loaded: LoadedModel, cases: list[tuple[list[int], list[int]]], tokens: int, batch: int,
             **settings: Any) -> dict[str, Any]:
    """Serve the last `batch` cases with staggered arrivals; asserts their ids and gives the counters."""
    chosen = cases[-batch:]
    llm = LLM(loaded, kv_cache_tokens=2048, max_model_len=256, max_num_seqs=batch, **settings)
    arrivals = [0, 0, 1, 5, 6, 13, 14, 30][:batch]
    outputs = serve(llm, [p for p, _ in chosen], SamplingParams(temperature=0, max_tokens=tokens), arrivals)
    assert token_ids(outputs) == [ids[:tokens] for _, ids in chosen], settings
    return llm.stats()


@pytest.mark.parametrize("kind", KINDS)
def test_top_probability_of_tiny_models(kind: str, tiny_cases: Cases) -> None:
    """The models are what cases need: neither flat nor certain."""
    prompt, ids = tiny_cases[kind][0]
    top = Reference.directory(tiny_path(kind)).logits(prompt + ids, len(ids)).softmax(-1).amax(-1)
    assert 0.2 <= float(top.median()) <= 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_plain(kind: str, tiny_models: dict[str, LoadedModel], tiny_cases: Cases) -> None:
    for page, batch in product(PAGES, BATCHES):
        stats = run_cell(tiny_models[kind], tiny_cases[kind], 64, batch, page_size=page, speculative_config=speculate(0))
        assert stats["num_draft_tokens"] == 0


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("k", DRAFTS)
@pytest.mark.parametrize("kind", KINDS)
def test_speculative(kind: str, k: int, ratio: float, tiny_models: dict[str, LoadedModel], tiny_cases: Cases) -> None:
    """Every page size, schedule and batch size. Drafts that see everything are all accepted; sparse ones only in part."""
    drafted = accepted = 0
    for page, schedule, batch in product(PAGES, SCHEDULES, BATCHES):
        stats = run_cell(tiny_models[kind], tiny_cases[kind], 24, batch, page_size=page,
                         speculative_config=speculate(k, ratio, schedule=schedule))
        drafted, accepted = drafted + stats["num_draft_tokens"], accepted + stats["num_accepted_tokens"]
    assert drafted > 100
    if ratio == 1.0:
        assert accepted == drafted
    else:
        assert 0 < accepted < drafted


@pytest.mark.slow
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("k", DRAFTS)
@pytest.mark.parametrize("kind", KINDS)
def test_speculative_long(kind: str, k: int, ratio: float, tiny_models: dict[str, LoadedModel], tiny_cases: Cases) -> None:
    for page, schedule, batch in product(PAGES, SCHEDULES, BATCHES):
        run_cell(tiny_models[kind], tiny_cases[kind], 64, batch, page_size=page,
                 speculative_config=speculate(k, ratio, schedule=schedule))


@pytest.mark.parametrize("kind", KINDS)
def test_adaptive(kind: str, tiny_models: dict[str, LoadedModel], tiny_cases: Cases) -> None:
    """Whatever length of draft is chosen, and whenever it changes."""
    for k, batch in ((8, 8), (4, 3)):
        run_cell(tiny_models[kind], tiny_cases[kind], 64, batch, speculative_config=speculate(k, adaptive=True))
    llm = LLM(tiny_models[kind], kv_cache_tokens=2048, max_model_len=256, speculative_config=speculate(8))
    lengths = cycle([8, 3, 0, 0, 1, 8, 2, 0, 5])
    llm.engine.scheduler.draft_length = lambda policy: next(lengths)
    cases = tiny_cases[kind]
    outputs = serve(llm, [p for p, _ in cases], SamplingParams(temperature=0, max_tokens=64))
    assert token_ids(outputs) == [ids for _, ids in cases]
    assert 0 < llm.stats()["num_accepted_tokens"] < llm.stats()["num_draft_tokens"]


@pytest.mark.parametrize(("chunk", "score_rows"), [(1, "all"), (7, "accepted"), (33, "all"), (33, "accepted")])
def test_prefill_in_chunks(chunk: int, score_rows: str, tiny_models: dict[str, LoadedModel], tiny_cases: Cases) -> None:
    """Prompts cut into chunks, mixed with the drafts and verifications of others."""
    for kind in KINDS:
        for k in (0, 4):
            run_cell(tiny_models[kind], tiny_cases[kind], 24, 8, max_num_batched_tokens=chunk,
                     speculative_config=speculate(k) if k == 0 else speculate(k, score_rows=score_rows))


@pytest.mark.parametrize("k", [0, 4])
def test_more_requests_than_slots(k: int, tiny_models: dict[str, LoadedModel], tiny_cases: Cases) -> None:
    cases = tiny_cases["qwen3"]
    llm = LLM(tiny_models["qwen3"], kv_cache_tokens=1024, max_model_len=256, max_num_seqs=3, speculative_config=speculate(k))
    outputs = serve(llm, [p for p, _ in cases], SamplingParams(temperature=0, max_tokens=64))
    assert token_ids(outputs) == [ids for _, ids in cases]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("k", [0, 1, 8])
def test_memory_that_nobody_owns_is_never_read(k: int, page: int, tiny_models: dict[str, LoadedModel], tiny_cases: Cases) -> None:
    """All free pages hold NaN before every step, so that reading one would show."""
    cases = tiny_cases["llama"]
    llm = LLM(tiny_models["llama"], kv_cache_tokens=2048, max_model_len=256, page_size=page, speculative_config=speculate(k))
    for i, (prompt, _) in enumerate(cases):
        llm.engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=8 * (i + 1)))
    done, poisoned = {}, 0
    while llm.engine.has_work():
        poisoned = max(poisoned, poison_free_pages(llm))
        done.update((o.request_id, o) for o in llm.engine.step())
    assert poisoned > 0
    assert [done[str(i)].outputs[0].token_ids for i in range(len(cases))] == [ids[:8 * (i + 1)] for i, (_, ids) in enumerate(cases)]


@pytest.mark.parametrize("k", [0, 4])
def test_preemption_forced_at_random(k: int, tiny_models: dict[str, LoadedModel], tiny_cases: Cases) -> None:
    """Requests are taken off the device in the middle of prompts, drafts and between rounds, and lose nothing."""
    cases = tiny_cases["qwen2"]
    llm = LLM(tiny_models["qwen2"], kv_cache_tokens=2048, max_model_len=256, max_num_batched_tokens=64,
              speculative_config=speculate(k))
    rng = np.random.default_rng(k)
    for i, (prompt, _) in enumerate(cases):
        llm.engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=64))
    done = {}
    while llm.engine.has_work():
        done.update((o.request_id, o) for o in llm.engine.step())
        running = sorted(running_requests(llm))
        if running and rng.random() < 0.3 and llm.stats()["num_preemptions"] < 60:
            force_preemption(llm, str(rng.choice(running)))
    assert llm.stats()["num_preemptions"] >= 15
    assert [done[str(i)].outputs[0].token_ids for i in range(len(cases))] == [ids for _, ids in cases]
    assert [done[str(i)].outputs[0].finish_reason for i in range(len(cases))] == ["length"] * len(cases)


@pytest.mark.parametrize("change", [
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}, {"num_kv_heads": 4},
    {"num_kv_heads": 1, "head_dim": 32},
], ids=lambda c: "-".join(str(v.get("rope_type") if isinstance(v, dict) else f"{k}={v}") for k, v in c.items()))
def test_variants_of_llama(change: dict[str, Any]) -> None:
    """RoPE kinds, tied heads, biases and head counts, all against Hugging Face."""
    path = tiny_model("llama", 1, **change)
    reference = Reference.directory(path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, n).tolist() for n in (5, 40, 90)]
    for k in (0, 4):
        llm = LLM(str(path), skip_tokenizer_init=True, kv_cache_tokens=1024, max_model_len=256, speculative_config=speculate(k))
        for prompt, ids in zip(prompts, token_ids(serve(llm, prompts, SamplingParams(temperature=0, max_tokens=32))), strict=True):
            reference.check(prompt, ids)
    assert reference.checked > 100
