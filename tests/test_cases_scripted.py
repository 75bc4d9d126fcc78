"""Request semantics on a target that follows a script, so that what is accepted is known: cases T2, T12, T16, T17, T35."""

from __future__ import annotations

import math

import pytest

from driving import completions, serve, speculate, token_ids
from sparsespec import LLM, CompletionOutput, SamplingParams
from sparsespec.core.plan import StepPlan, StepResult
from sparsespec.loader.loaded import LoadedModel
from sparsespec.testing import override_drafts, scripted

Cases = dict[str, list[tuple[list[int], list[int]]]]
pytestmark = pytest.mark.usefixtures("one_thread")

K = 8
EOS = 200


def counting(token: int, position: int) -> int:
    """Each token is followed by the next number."""
    return (token + 1) % 256


def engine(script: object = counting, k: int = K, **settings: object) -> LLM:
    loaded = scripted(script, eos_token_ids=[EOS])  # type: ignore[arg-type]
    return LLM(loaded, kv_cache_tokens=2048, max_model_len=256, speculative_config=speculate(k), **settings)


def greedy(**settings: object) -> SamplingParams:
    return SamplingParams(temperature=0, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong_draft", [None, 11, 99])
@pytest.mark.parametrize("k", [0, 1, 4, 8, 16])
def test_t02_exact_ties_go_to_the_lowest_id(k: int, wrong_draft: int | None) -> None:
    """Ids 7 and 11 tie bitwise. Also where every draft is the other one."""
    llm = engine(lambda token, position: (11, 7), k)
    with override_drafts(llm, lambda request_id, position: wrong_draft):
        out = completions(serve(llm, [[1, 2, 3], [5] * 30], greedy(max_tokens=24, logprobs=2)))
    for c in out:
        assert c.token_ids == [7] * 24
        assert c.logprobs is not None
        for row in c.logprobs:
            assert list(row) == [7, 11]
            assert (row[7].rank, row[11].rank) == (1, 1)
            assert row[7].logprob == row[11].logprob == pytest.approx(-math.log(2), abs=1e-5)
    stats = llm.stats()
    if k:
        assert stats["num_draft_tokens"] > 0
        assert (stats["num_accepted_tokens"] == stats["num_draft_tokens"]) is (wrong_draft is None)
        assert wrong_draft is None or stats["num_accepted_tokens"] == 0


@pytest.mark.parametrize("schedule", ["unified", "lockstep"])
def test_t12_eos_accepted_in_a_block_ends_the_text_there(schedule: str) -> None:
    """EOS at each place of the first two blocks. The slot's next request is not disturbed."""
    llm = LLM(scripted(counting, eos_token_ids=[EOS]), kv_cache_tokens=512, max_model_len=256, max_num_seqs=1,
              speculative_config=speculate(K, schedule=schedule))
    for offset in range(1, 2 * K + 3):
        first, after = completions(serve(llm, [[3, EOS - offset], [3, 20]], [greedy(max_tokens=64), greedy(max_tokens=12)]))
        assert first.token_ids == list(range(EOS - offset + 1, EOS + 1))
        assert (first.finish_reason, first.stop_reason) == ("stop", None)
        assert (after.token_ids, after.finish_reason) == (list(range(21, 33)), "length")
    assert llm.stats()["num_accepted_tokens"] > 0


def test_t12_on_a_real_model(tiny_models: dict[str, LoadedModel], tiny_cases: Cases) -> None:
    """The same with stop ids: the text ends at the first of them, and the slot's next request equals Hugging Face's."""
    (prompt, ids), (other, wanted) = tiny_cases["qwen3"][:2]
    llm = LLM(tiny_models["qwen3"], kv_cache_tokens=512, max_model_len=256, max_num_seqs=1, speculative_config=speculate(K, 1.0))
    for offset in range(1, 2 * K + 3):
        stop = ids[offset - 1]
        end = ids.index(stop) + 1
        first, after = completions(serve(llm, [prompt, other], [
            greedy(max_tokens=64, stop_token_ids=[stop]), greedy(max_tokens=20)]))
        assert first.token_ids == ids[:end]
        assert (first.finish_reason, first.stop_reason) == ("stop", stop)
        assert after.token_ids == wanted[:20]


def test_min_tokens_holds_eos_back() -> None:
    """EOS is forbidden until min_tokens is reached, in drafts and in the target; then it ends the text again."""
    llm = engine(lambda token, position: (EOS, 5))  # a tie: 5 is lower, so EOS comes only where 5 is forbidden
    c = completions(serve(llm, [[1, 2]], greedy(max_tokens=40, min_tokens=13, logit_bias={5: -1.0})))[0]
    assert c.token_ids == [5] * 13 + [EOS]
    assert c.finish_reason == "stop"


@pytest.mark.parametrize("k", [0, K])
def test_t16_max_tokens_is_exact(k: int) -> None:
    """Every max_tokens from 1 to 2K + 3, with a target that wants EOS all the time and requests that ignore it."""
    llm = engine(lambda token, position: EOS, k)
    limits = list(range(1, 2 * K + 4))
    for arrivals in (None, [i % 5 for i in range(len(limits))]):
        out = serve(llm, [[1, 2, 3]] * len(limits), [greedy(max_tokens=n, ignore_eos=True) for n in limits], arrivals)
        assert [len(c.token_ids) for c in completions(out)] == limits
        assert {c.finish_reason for c in completions(out)} == {"length"}
        assert [len(o.prompt_token_ids) for o in out] == [3] * len(limits)


@pytest.mark.parametrize("k", [0, 1, K, 16])
def test_t17_max_model_len_is_exact(k: int, tiny_models: dict[str, LoadedModel], tiny_cases: Cases) -> None:
    """Prompts of 40 to 63 tokens fill 64 positions and no more; a short neighbour equals Hugging Face's text."""
    neighbour, wanted = next((p, ids) for p, ids in tiny_cases["llama"] if len(p) < 45)
    llm = LLM(tiny_models["llama"], kv_cache_tokens=64 * 25, max_model_len=64, page_size=1, speculative_config=speculate(k))
    execute, highest = llm.engine.runner.execute, []

    def watch(plan: StepPlan) -> StepResult:
        highest.append(int((plan.starts + plan.rows).max()))
        return execute(plan)

    llm.engine.runner.execute = watch  # type: ignore[method-assign]
    prompts = [[i % 256 for i in range(n)] for n in range(40, 64)]
    params = [greedy(max_tokens=None if n % 2 else 1000, ignore_eos=True) for n in range(40, 64)]
    out = serve(llm, [*prompts, neighbour], [*params, greedy(max_tokens=16)], [0, 3] * 12 + [1])
    for o in out[:-1]:
        assert len(o.prompt_token_ids) + len(o.outputs[0].token_ids) == 64
        assert o.outputs[0].finish_reason == "length"
    assert out[-1].outputs[0].token_ids == wanted[:16]
    assert max(highest) <= 64


def accounting(llm: LLM) -> tuple[int, int, int, list[int]]:
    s = llm.stats()
    return s["num_drafts"], s["num_draft_tokens"], s["num_accepted_tokens"], s["accepted_per_position"]


def run_one(llm: LLM, start: int, max_tokens: int, right: int) -> CompletionOutput:
    """One request whose first round drafts `right` tokens as the script goes on, and wrong ones after them."""
    def drafts(request_id: str, position: int) -> int:
        place = position - 3  # 0 for the first draft: the prompt has two tokens, and prefill gives one
        return (start + position - 1) % 256 if place < right else 0

    with override_drafts(llm, drafts):
        return completions(serve(llm, [[3, start]], greedy(max_tokens=max_tokens)))[0]


def test_t35_accepted_counts_end_at_eos() -> None:
    """Five drafts are right and EOS is the third: three tokens come of the round, and three drafts count as accepted."""
    llm = engine()
    c = run_one(llm, EOS - 4, 50, right=5)
    assert c.token_ids == [EOS - 3, EOS - 2, EOS - 1, EOS]
    assert accounting(llm) == (1, K, 3, [1, 1, 1, 0, 0, 0, 0, 0])
    assert llm.stats()["num_emitted_tokens"] == 4


def test_t35_accepted_counts_are_exact() -> None:
    """Five of eight right; then every number of right drafts from none to all."""
    for right in range(K + 1):
        llm = engine()
        c = run_one(llm, 10, right + 2, right)  # a token of prefill, `right` drafts and the target's own
        assert c.token_ids == list(range(11, 13 + right))
        drafted = min(K, right)  # no more than max_tokens leaves room for
        assert accounting(llm) == (int(drafted > 0), drafted, drafted, [1] * drafted + [0] * (K - drafted))
    llm = engine()
    run_one(llm, 10, 1 + 6 + 1, right=5)
    assert accounting(llm) == (1, 6, 5, [1, 1, 1, 1, 1, 0, 0, 0])


def test_t35_nothing_is_counted_without_speculation() -> None:
    llm = engine(k=0)
    out = serve(llm, [[3, 10]], greedy(max_tokens=20))[0]
    assert accounting(llm) == (0, 0, 0, [])
    assert out.metrics is not None
    assert (out.metrics.num_drafts, out.metrics.num_draft_tokens, out.metrics.num_accepted_tokens) == (0, 0, 0)
    assert not any(isinstance(v, float) and math.isnan(v) for v in llm.stats().values())


def test_drafts_always_wrong_change_nothing() -> None:
    llm = engine()
    with override_drafts(llm, lambda request_id, position: 255):
        out = token_ids(serve(llm, [[3, i] for i in range(8)], greedy(max_tokens=30), [0, 0, 1, 2, 3, 4, 9, 9]))
    assert out == [list(range(i + 1, i + 31)) for i in range(8)]
    assert llm.stats()["num_accepted_tokens"] == 0
    assert llm.stats()["num_draft_tokens"] > 100
