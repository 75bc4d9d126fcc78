"""Greedy output equals Hugging Face's, token for token, whichever policy drafts: alone, mixed in a batch, and disturbed."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from driving import assert_idle, serve, token_ids
from policies import POLICIES, TARGET, configure, per_request, target
from reference import Reference, tiny_prompts
from sparsespec import LLM, SamplingParams
from sparsespec.testing import force_preemption, poison_free_pages, running_requests, scripted

pytestmark = pytest.mark.usefixtures("one_thread")
DRAFTS, BATCHES = (1, 4, 8), (1, 3, 8)
TOKENS = 40
ARRIVALS = [0, 0, 1, 5, 6, 13, 14, 30]
MIXED = sorted(POLICIES)
Cases = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def cases() -> Cases:
    """8 screened prompts with the 40 greedy tokens that Hugging Face gives; one repeats itself, so that n-grams match."""
    llm = LLM(target(), speculative_config={"method": "none"}, kv_cache_tokens=2048, max_model_len=256)
    prompts = tiny_prompts(16, seed=2)
    prompts[0] = prompts[0][:15] * 5
    return Reference.directory(TARGET).screen(llm, prompts, TOKENS, 8)


def run(cases: Cases, batch: int, tokens: int, config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Serve `batch` cases with staggered arrivals; asserts their ids and gives the counters."""
    settings = {"kv_cache_tokens": 2048, "max_model_len": 256, "max_num_seqs": batch, **settings}
    llm = LLM(target(), speculative_config=config, **settings)
    chosen = cases[:batch]
    outputs = serve(llm, [p for p, _ in chosen], SamplingParams(temperature=0, max_tokens=tokens), ARRIVALS[:batch])
    assert token_ids(outputs) == [ids[:tokens] for _, ids in chosen]
    return llm.stats()


@pytest.mark.parametrize("name", POLICIES)
def test_alone(name: str, cases: Cases) -> None:
    """Every k and batch. Views are small enough that drafts are wrong now and then."""
    drafted = accepted = 0
    for k, batch in product(DRAFTS, BATCHES):
        stats = run(cases, batch, 9, configure(name, k))
        drafted, accepted = drafted + stats["num_draft_tokens"], accepted + stats["num_accepted_tokens"]
    assert drafted > 100
    assert accepted < drafted
    if name not in ("eagle3", "ngram"):  # what they propose is hardly ever what a random model writes
        assert accepted > 0


@pytest.mark.parametrize("name", ["ngram", "hierarchy", "triforce"])
def test_repetition_is_found(name: str) -> None:
    """A target that counts round and round: n-grams are right once they have seen a round."""
    llm = LLM(scripted(lambda token, position: position % 11, vocab_size=32), kv_cache_tokens=256, max_model_len=128,
              speculative_config=configure(name, 4))
    out = serve(llm, [[0, 1, 2]], SamplingParams(temperature=0, max_tokens=80))[0].outputs[0]
    assert out.token_ids == [p % 11 for p in range(3, 83)]
    stats = llm.stats()
    assert stats["num_accepted_tokens"] > (0.8 if name == "ngram" else 0.99) * stats["num_draft_tokens"] > 40
    most = {"ngram": 30, "hierarchy": 50, "triforce": 60}[name]  # passes over the weights, of 80 without drafts
    assert stats["iterations"] <= most


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["unified", "lockstep"])
@pytest.mark.parametrize("name", POLICIES)
def test_alone_long(name: str, schedule: str, cases: Cases) -> None:
    for k, batch, page in product(DRAFTS, BATCHES, (1, 16)):
        run(cases, batch, TOKENS, configure(name, k, schedule=schedule), page_size=page)


@pytest.mark.parametrize("name", POLICIES)
def test_prompts_in_chunks_and_lockstep(name: str, cases: Cases) -> None:
    """Chunks as small as a row, some ending in the middle of what is scored; pages of 16."""
    for chunk, batch in ((1, 1), (19, 3)):
        run(cases, batch, 10, configure(name, 4, schedule="lockstep"), max_num_batched_tokens=chunk, page_size=16)


def mixed_engine(**settings: Any) -> LLM:
    """An engine in which a request may ask for every policy."""
    settings = {"kv_cache_tokens": 4096, "max_model_len": 256, "max_num_seqs": len(MIXED), **settings}
    return LLM(target(), speculative_config=configure("hierarchy-eagle3", 8), **settings)


def mixed_params(tokens: int) -> list[SamplingParams]:
    """One request for each policy, with a k of its own."""
    return [SamplingParams(temperature=0, max_tokens=tokens, speculative_config=per_request(name, 1 + i % 8))
            for i, name in enumerate(MIXED)]


def check(outputs: list[list[int]], cases: Cases, tokens: int) -> None:
    """Outputs by index are those of the cases, which come around again."""
    for i, ids in enumerate(outputs):
        assert ids == cases[i % len(cases)][1][:tokens], MIXED[i % len(MIXED)]


def test_every_policy_in_one_batch(cases: Cases) -> None:
    llm = mixed_engine()
    prompts = [cases[i % len(cases)][0] for i in range(len(MIXED))]
    outputs = serve(llm, prompts, mixed_params(30), [3 * (i % 5) for i in range(len(MIXED))])
    check(token_ids(outputs), cases, 30)
    assert len(llm.engine.policies) >= len(MIXED)
    assert 0 < llm.stats()["num_accepted_tokens"] < llm.stats()["num_draft_tokens"]


@pytest.mark.parametrize("schedule", ["unified", "lockstep"])
def test_one_seed_gives_one_text(schedule: str, cases: Cases) -> None:
    """Requests that sample with a seed of their own write the same whoever drafts, penalties and truncation included."""
    prompt = cases[0][0]
    wanted = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "repetition_penalty": 1.2, "top_p": 0.9, "min_tokens": 8,
              "stop_token_ids": list(range(0, 256, 25)), "logit_bias": {7: 1.5}}
    plain = LLM(target(), kv_cache_tokens=256, max_model_len=256, speculative_config={"method": "none"})
    expected = plain.generate(prompt, SamplingParams(**wanted), use_tqdm=False)[0].outputs[0]
    llm = LLM(target(), kv_cache_tokens=4096, max_model_len=256, max_num_seqs=len(MIXED),
              speculative_config=configure("hierarchy-eagle3", 8, schedule=schedule))
    params = [SamplingParams(**wanted, speculative_config=per_request(name, 1 + i % 8)) for i, name in enumerate(MIXED)]
    for name, out in zip(MIXED, serve(llm, [prompt] * len(MIXED), params, [i % 4 for i in range(len(MIXED))]), strict=True):
        assert (out.outputs[0].token_ids, out.outputs[0].stop_reason) == (expected.token_ids, expected.stop_reason), name


@pytest.mark.parametrize("seed", [0, 1])
def test_preempted_at_random(seed: int, cases: Cases) -> None:
    """In the middle of prompts, drafts and proposals; each request returns to a slot that another policy may have had."""
    llm = mixed_engine(max_num_batched_tokens=64, max_num_seqs=6)
    rng = np.random.default_rng(seed)
    for i, params in enumerate(mixed_params(30)):
        llm.engine.add_request(str(i), cases[i % len(cases)][0], params)
    done = {}
    while llm.engine.has_work():
        done.update((o.request_id, o) for o in llm.engine.step())
        running = sorted(running_requests(llm))
        if running and rng.random() < 0.3 and llm.stats()["num_preemptions"] < 40:
            force_preemption(llm, str(rng.choice(running)))
    assert llm.stats()["num_preemptions"] >= 20
    check(token_ids([done[str(i)] for i in range(len(MIXED))]), cases, 30)
    assert_idle(llm)


def test_a_pool_for_a_few(cases: Cases) -> None:
    """KV for about three requests: the engine preempts by itself, and computes again."""
    llm = mixed_engine(kv_cache_tokens=320)
    prompts = [cases[i % len(cases)][0] for i in range(len(MIXED))]
    check(token_ids(serve(llm, prompts, mixed_params(30))), cases, 30)
    assert llm.stats()["num_preemptions"] > 0


def test_aborts_leave_the_others_alone(cases: Cases) -> None:
    """Every other request is aborted at a random step; new ones take the slots. Free memory holds NaN all the while."""
    llm = mixed_engine(max_num_seqs=9)
    rng = np.random.default_rng(0)
    count = 2 * len(MIXED)
    for i, params in enumerate(mixed_params(30) * 2):
        llm.engine.add_request(str(i), cases[i % len(MIXED) % len(cases)][0], params)
    done, aborted, now = {}, 0, 0
    when = {str(i): int(rng.integers(1, 40)) + 3 * i for i in range(0, count, 2)}
    while llm.engine.has_work():
        poison_free_pages(llm)
        done.update((o.request_id, o) for o in llm.engine.step())
        now += 1
        for name in [n for n, at in when.items() if at <= now]:
            out = llm.engine.abort(name)
            del when[name]
            if out is not None:
                aborted += 1
                ids = out.outputs[0].token_ids
                assert ids == cases[int(name) % len(MIXED) % len(cases)][1][:len(ids)]
    assert aborted > 5
    for i in range(1, count, 2):
        assert done[str(i)].outputs[0].token_ids == cases[i % len(MIXED) % len(cases)][1][:30]
    assert_idle(llm)


@pytest.mark.parametrize("name", ["ngram", "eagle3", "hierarchy", "hierarchy-eagle3", "quest"])
def test_lengths_that_change(name: str, cases: Cases) -> None:
    """k changes from round to round and is zero at times, as an adaptive engine has it."""
    llm = LLM(target(), kv_cache_tokens=2048, max_model_len=256, speculative_config=configure(name, 8))
    rng = np.random.default_rng(0)
    llm.engine.scheduler.draft_length = lambda policy: int(rng.choice([8, 3, 0, 1, 2, 5]))
    outputs = serve(llm, [p for p, _ in cases], SamplingParams(temperature=0, max_tokens=TOKENS))
    assert token_ids(outputs) == [ids for _, ids in cases]


@pytest.mark.parametrize("name", POLICIES)
def test_the_end_of_the_context(name: str, cases: Cases) -> None:
    """No draft passes max_model_len, and the last token is the right one."""
    for k in (4, 8):
        prompt, ids = cases[1]
        for room in (1, 2, 5, 9):
            llm = LLM(target(), kv_cache_tokens=512, max_model_len=len(prompt) + room, speculative_config=configure(name, k))
            out = serve(llm, [prompt], SamplingParams(temperature=0, ignore_eos=True))[0].outputs[0]
            assert (out.token_ids, out.finish_reason) == (ids[:room], "length")
