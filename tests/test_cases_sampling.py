"""Sampling settings under speculation: biases and truncation on every token, seeds, log probabilities. Cases T6, T9, T10, T21."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from driving import completions, serve, speculate, token_ids
from reference import Reference, tiny_path, tiny_prompts
from sparsespec import LLM, CompletionOutput, SamplingParams
from sparsespec.loader.loaded import LoadedModel
from sparsespec.testing import scripted
from stat_utils import BROKEN, SOUND, chi_square

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {"kv_cache_tokens": 16384, "max_model_len": 256}


def tiny(loaded: dict[str, LoadedModel], k: int, **settings: object) -> LLM:
    return LLM(loaded["qwen3"], speculative_config=speculate(k), **{**TINY, **settings})


# -- T6 --------------------------------------------------------------------------------------------------------------


def test_t06_bias_reaches_every_token(smol: LoadedModel) -> None:
    """-100 on " the" keeps it out of 200 tokens; +100 makes every token it. Greedy and at temperature 1, in one batch."""
    the = smol.tokenizer(" the")["input_ids"]
    assert len(the) == 1
    llm = LLM(smol, kv_cache_tokens=2048, max_model_len=512, max_num_seqs=6, speculative_config=speculate(4))
    prompt = smol.tokenizer("In the middle of the night the king of the forest saw that the moon and the")["input_ids"]
    settings = [(t, b) for t in (0.0, 1.0) for b in ({the[0]: -100.0}, {the[0]: 100.0}, None)]
    params = [SamplingParams(temperature=t, max_tokens=200 if b else 60, ignore_eos=True, logit_bias=b) for t, b in settings]
    out = token_ids(serve(llm, [prompt] * 6, params, [0, 1, 3, 0, 5, 2]))
    for without, only, free in (out[:3], out[3:]):
        assert len(without) == 200
        assert the[0] not in without
        assert only == the * 200
        assert the[0] in free
    assert 0 < llm.stats()["num_accepted_tokens"] < llm.stats()["num_draft_tokens"]


def below_min_p(outputs: list[CompletionOutput], min_p: float) -> int:
    """Tokens whose probability is below min_p times the largest; raw log probabilities at temperature 1."""
    count = 0
    for c in outputs:
        assert c.logprobs is not None
        for token, row in zip(c.token_ids, c.logprobs, strict=True):
            best = max(entry.logprob for entry in row.values())
            count += row[token].logprob < best + math.log(min_p) - 1e-4
    return count


@pytest.mark.parametrize("seeded", [False, True])
def test_t06_min_p_holds_for_every_token(seeded: bool, tiny_models: dict[str, LoadedModel]) -> None:
    """64 requests of 128 tokens never go below 0.2 of the most likely; without min_p they do."""
    llm = tiny(tiny_models, 8, max_num_seqs=64)
    prompts = tiny_prompts(64, seed=3)
    for min_p, count in ((0.2, 64), (0.0, 4)):
        params = [SamplingParams(temperature=1.0, min_p=min_p, max_tokens=128, logprobs=1, seed=i if seeded else None)
                  for i in range(count)]
        out = completions(serve(llm, prompts[:count], params))
        assert sum(len(c.token_ids) for c in out) == 128 * count
        assert (below_min_p(out, 0.2) == 0) is (min_p > 0)
    assert 0 < llm.stats()["num_accepted_tokens"] < llm.stats()["num_draft_tokens"]


@pytest.mark.slow
def test_t06_min_p_on_smollm2(smol: LoadedModel) -> None:
    llm = LLM(smol, kv_cache_tokens=16384, max_model_len=512, max_num_seqs=64, speculative_config=speculate(8))
    prompts = [smol.tokenizer(f"Story number {i}: it was")["input_ids"] for i in range(64)]
    out = completions(serve(llm, prompts, SamplingParams(temperature=1.0, min_p=0.2, max_tokens=128, logprobs=1, ignore_eos=True)))
    assert sum(len(c.token_ids) for c in out) == 64 * 128
    assert below_min_p(out, 0.2) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_setting_reaches_every_token(temperature: float, tiny_models: dict[str, LoadedModel]) -> None:
    """Allowed ids, penalties and top_k in one batch, each its own request's alone; greedy ones equal plain decoding's."""
    settings: list[dict[str, object]] = [
        {"allowed_token_ids": list(range(0, 256, 16))}, {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 1.8}, {"top_k": 1}, {"logit_bias": dict.fromkeys(range(128), -100.0)}, {}]
    prompts = tiny_prompts(len(settings), seed=4)
    params = [SamplingParams(temperature=temperature, max_tokens=64, **s) for s in settings]  # type: ignore[arg-type]
    plain = token_ids(serve(tiny(tiny_models, 0), prompts, params))
    spec = tiny(tiny_models, 4)
    out = token_ids(serve(spec, prompts, params, [0, 0, 1, 1, 2, 7]))
    assert 0 < spec.stats()["num_accepted_tokens"] < spec.stats()["num_draft_tokens"]
    assert all(i % 16 == 0 for i in out[0])
    assert all(i >= 128 for i in out[4])
    assert any(i < 128 for i in out[5])
    if temperature == 0:
        assert out == plain
    else:
        assert out[3] == plain[3]  # top_k = 1 leaves one choice


# -- T9 and T10 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 4, 8])
def test_t09_a_seed_fixes_the_text(k: int, tiny_models: dict[str, LoadedModel]) -> None:
    """Alone, and with 7 neighbours in 5 arrival orders; and the same for every k and budget."""
    prompt, *others = tiny_prompts(8, seed=5)
    mine = SamplingParams(temperature=1.0, seed=7, max_tokens=48)
    wanted = token_ids(serve(tiny(tiny_models, 0), [prompt], mine))[0]
    assert len(set(wanted)) > 10
    llm = tiny(tiny_models, k, max_num_batched_tokens=96)
    assert token_ids(serve(llm, [prompt], mine))[0] == wanted
    rng = np.random.default_rng(k)
    for order in range(5):
        neighbours = [SamplingParams(temperature=float(rng.choice([0, 0.7, 1.3])), seed=[None, 7, i][i % 3], max_tokens=20 + 9 * i,
                                     top_k=int(rng.choice([0, 20]))) for i in range(7)]
        arrivals = [int(i) for i in rng.integers(0, 12, 8)]
        place = order + 1  # where among the others it stands in the queue
        prompts, params = [*others[:place], prompt, *others[place:]], [*neighbours[:place], mine, *neighbours[place:]]
        assert token_ids(serve(llm, prompts, params, arrivals))[place] == wanted
    if k:
        assert 0 < llm.stats()["num_accepted_tokens"] < llm.stats()["num_draft_tokens"]
        for ratio in (0.3, 1.0):
            other = LLM(tiny_models["qwen3"], speculative_config=speculate(k, ratio), **TINY)
            assert token_ids(serve(other, [prompt], mine))[0] == wanted


def test_t09_completions_of_one_seeded_prompt_differ(tiny_models: dict[str, LoadedModel]) -> None:
    llm = tiny(tiny_models, 4)
    prompt = tiny_prompts(1, seed=6)[0]
    params = SamplingParams(temperature=1.0, seed=7, n=4, max_tokens=16)
    first, again = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    texts = [c.token_ids for c in first.outputs]
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(t) for t in texts}) == 4
    assert [c.token_ids for c in again.outputs] == texts


@pytest.mark.parametrize("k", [0, 4])
def test_t10_unseeded_requests_share_no_stream(k: int, tiny_models: dict[str, LoadedModel]) -> None:
    """64 serial requests for the same prompt give at least 60 different outputs."""
    llm = tiny(tiny_models, k)
    prompt = tiny_prompts(1, seed=7)[0]
    seen = {tuple(llm.generate(prompt, SamplingParams(temperature=1.5, max_tokens=8), use_tqdm=False)[0].outputs[0].token_ids)
            for _ in range(64)}
    assert len(seen) >= 60


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_t10_first_tokens_follow_the_distribution(seed: int, tiny_models: dict[str, LoadedModel]) -> None:
    prompt = tiny_prompts(1, seed=7)[0][:6]
    logits = Reference.directory(tiny_path("qwen3")).logits([*prompt, 0], 1)[0]
    llm = tiny(tiny_models, 4, seed=seed)
    out = llm.generate(prompt, SamplingParams(temperature=1.5, n=5000, max_tokens=1), use_tqdm=False)[0]
    drawn = torch.tensor([c.token_ids[0] for c in out.outputs])
    assert chi_square(drawn, (logits / 1.5).softmax(-1)) >= SOUND
    assert chi_square(drawn, (logits / 1.3).softmax(-1)) < BROKEN
    assert chi_square(drawn[:1].repeat(5000), (logits / 1.5).softmax(-1)) < BROKEN


# -- T21 -------------------------------------------------------------------------------------------------------------


def truncated(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Log probabilities [N, V] after temperature, top_k and top_p, renormalised; -inf where cut."""
    x = logits / temperature
    x = x.masked_fill(x < x.topk(top_k).values[:, -1:], -torch.inf)
    order = x.argsort(-1, descending=True)
    best = x.softmax(-1).gather(1, order)
    cut = torch.zeros_like(x, dtype=torch.bool).scatter(1, order, best.cumsum(-1) - best >= top_p)
    return x.masked_fill(cut, -torch.inf).log_softmax(-1)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("k", [0, 4])
def test_t21_logprobs_are_the_models(k: int, mode: str, tiny_models: dict[str, LoadedModel]) -> None:
    """Those of drafted and accepted tokens, of rejected places and of bonus tokens, all against Hugging Face."""
    prompts = tiny_prompts(4, seed=8)
    params = SamplingParams(temperature=0.7, top_k=10, top_p=0.8, max_tokens=40, logprobs=5)
    llm = tiny(tiny_models, k, logprobs_mode=mode)
    cut = 0
    for prompt, c in zip(prompts, completions(serve(llm, prompts, params, [0, 1, 2, 9])), strict=True):
        logits = Reference.directory(tiny_path("qwen3")).logits(prompt + c.token_ids, 40)
        wanted = logits.log_softmax(-1) if mode == "raw_logprobs" else truncated(logits, 0.7, 10, 0.8)
        assert c.logprobs is not None
        assert len(c.logprobs) == len(c.token_ids) == 40
        assert c.cumulative_logprob == pytest.approx(sum(r[t].logprob for r, t in zip(c.logprobs, c.token_ids, strict=True)))
        for row, token, lp in zip(c.logprobs, c.token_ids, wanted, strict=True):
            assert next(iter(row)) == token
            assert set(row) >= set(lp.topk(min(5, int(lp.isfinite().sum()))).indices.tolist())
            assert row[token].logprob > -100  # what was drawn was not cut
            for i, entry in row.items():
                assert math.isfinite(entry.logprob)
                assert entry.logprob <= 0
                assert entry.rank is not None
                if lp[i].isfinite():
                    assert entry.logprob == pytest.approx(float(lp[i]), abs=2e-4)
                    assert entry.rank == int((lp > lp[i] + 1e-6).sum()) + 1
                else:
                    cut += 1
                    assert entry.logprob < -1000
    assert (cut > 0) is (mode == "processed_logprobs")


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_t21_a_gap_of_200_stays_finite(mode: str, temperature: float) -> None:
    loaded = scripted(lambda token, position: position % 256, gap=200.0)
    llm = LLM(loaded, logprobs_mode=mode, speculative_config=speculate(4), **TINY)
    params = SamplingParams(temperature=temperature, top_p=0.8, max_tokens=20, logprobs=4, prompt_logprobs=2)
    out = serve(llm, [[1, 2, 3]], params)[0]
    c = out.outputs[0]
    assert c.token_ids == list(range(3, 23))
    rows = [*(c.logprobs or []), *(out.prompt_logprobs or [])[1:]]
    assert len(rows) == 22
    for row in rows:
        assert row is not None
        for entry in row.values():
            assert math.isfinite(entry.logprob)
            assert entry.logprob <= 0
    assert c.cumulative_logprob == pytest.approx(0.0, abs=1e-4)


def test_prompt_logprobs_are_the_models(tiny_models: dict[str, LoadedModel]) -> None:
    """In chunks of a few tokens, with others decoding beside."""
    prompts = tiny_prompts(3, seed=9)
    llm = tiny(tiny_models, 4, max_num_batched_tokens=16)
    for prompt, out in zip(prompts, serve(llm, prompts, SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=3), [0, 2, 4]),
                           strict=True):
        wanted = Reference.directory(tiny_path("qwen3")).logits(prompt, len(prompt) - 1).log_softmax(-1)
        assert out.prompt_logprobs is not None
        assert out.prompt_logprobs[0] is None
        assert len(out.prompt_logprobs) == len(prompt)
        for row, token, lp in zip(out.prompt_logprobs[1:], prompt[1:], wanted, strict=True):
            assert row is not None
            assert row[token].logprob == pytest.approx(float(lp[token]), abs=2e-4)
            assert set(row) >= set(lp.topk(3).indices.tolist())
