"""The prefix cache, new weights and sleep: what is found is what would have been computed, and nobody finds what is not his."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from driving import assert_idle, serve, speculate, token_ids
from reference import tiny_path
from sparsespec import LLM, InvalidValueError, ModelLoadError, SamplingParams, StateError
from sparsespec.config.engine import LoadConfig
from sparsespec.loader import load_model
from sparsespec.loader.loaded import LoadedModel
from sparsespec.testing import FailingCopier, LateCopier, poison_free_pages, tiny_qwen3, use_copier

Models = dict[str, LoadedModel]
Cases = dict[str, list[tuple[list[int], list[int]]]]
pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=64)
TOKEN = 512 / (1 << 30)  # GiB that one token of the tiny model takes


def engine(loaded: LoadedModel, pool: int = 2048, *, k: int = 4, page: int = 4, **settings: Any) -> LLM:
    return LLM(loaded, **{"max_model_len": 256, "kv_cache_tokens": pool, "page_size": page,
                          "speculative_config": speculate(k, 0.3), **settings})


@pytest.mark.parametrize(("k", "page"), [(0, 4), (4, 1), (8, 16)])
def test_a_hit_changes_no_output(k: int, page: int, tiny_models: Models, tiny_cases: Cases) -> None:
    """All but the last rows come from the cache, and at least those whose logits and scores are wanted are computed."""
    cases = tiny_cases["qwen3"][:4]
    llm = engine(tiny_models["qwen3"], k=k, page=page)
    first = serve(llm, [p for p, _ in cases], GREEDY)
    assert [o.num_cached_tokens for o in first] == [0] * 4
    again = serve(llm, [p for p, _ in cases], GREEDY, after_step=poison_free_pages)
    assert token_ids(first) == token_ids(again) == [ids for _, ids in cases]
    rows = k + 1 if k else 1
    assert [o.num_cached_tokens for o in again] == [(len(p) - rows) // page * page for p, _ in cases]
    assert llm.stats()["num_cached_tokens"] == sum(o.num_cached_tokens for o in again)


def test_a_longer_text_finds_prompt_and_output_of_a_shorter_one(tiny_models: Models, tiny_cases: Cases) -> None:
    """As in a conversation: the next prompt begins with the last one and its answer."""
    prompt, wanted = tiny_cases["qwen3"][0]
    llm = engine(tiny_models["qwen3"])
    half = SamplingParams(temperature=0, max_tokens=32)
    serve(llm, [prompt], half)
    rest = serve(llm, [prompt + wanted[:32]], half)[0]
    assert rest.outputs[0].token_ids == wanted[32:]
    assert len(prompt) < rest.num_cached_tokens <= len(prompt) + 32 - 5


def test_running_requests_share_pages(tiny_models: Models, tiny_cases: Cases) -> None:
    """A request that begins while another one with its prompt runs takes few pages of its own."""
    prompt, wanted = tiny_cases["qwen3"][0]
    llm = engine(tiny_models["qwen3"])
    out = serve(llm, [prompt, prompt], GREEDY, arrivals=[0, 6], after_step=poison_free_pages)
    assert token_ids(out) == [wanted, wanted]
    assert out[1].num_cached_tokens > len(prompt) - 9


def test_deterministic_mode_stays_bitwise(tiny_cases: Cases) -> None:
    loaded = load_model(LoadConfig(model=str(tiny_path("qwen3")), skip_tokenizer_init=True, device="cpu"), deterministic=True)
    prompt = tiny_cases["qwen3"][0][0]
    params = SamplingParams(temperature=0, max_tokens=32, logprobs=0)
    llm = engine(loaded, deterministic=True)
    outs = [serve(llm, [prompt], params)[0] for _ in range(2)]
    assert outs[1].num_cached_tokens > 0
    found = [[row[t].logprob for t, row in zip(o.outputs[0].token_ids, o.outputs[0].logprobs or [], strict=True)] for o in outs]
    assert found[0] == found[1]


def test_salts_keep_callers_apart(tiny_models: Models, tiny_cases: Cases) -> None:
    prompt, wanted = tiny_cases["qwen3"][0]
    llm = engine(tiny_models["qwen3"])

    def ask(**salt: Any) -> int:
        out = llm.generate({"prompt_token_ids": prompt, **salt}, GREEDY, use_tqdm=False)[0]
        assert out.outputs[0].token_ids == wanted
        return out.num_cached_tokens

    assert (ask(cache_salt="a"), ask(), ask(cache_salt="b")) == (0, 0, 0)
    assert ask(cache_salt="a") == ask() > 0
    with pytest.raises(InvalidValueError) as info:
        ask(cache_salt=7)
    assert info.value.field == "cache_salt"


def test_prompt_logprobs_are_computed_and_a_reset_forgets(tiny_models: Models, tiny_cases: Cases) -> None:
    prompt, wanted = tiny_cases["qwen3"][0]
    llm = engine(tiny_models["qwen3"])
    serve(llm, [prompt], GREEDY)
    out = serve(llm, [prompt], SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0))[0]
    assert out.num_cached_tokens == 0
    assert out.prompt_logprobs is not None
    assert [row is None for row in out.prompt_logprobs] == [True] + [False] * (len(prompt) - 1)
    assert llm.stats()["cached_pages"] > 0
    llm.reset_prefix_cache()
    assert llm.stats()["cached_pages"] == 0
    assert serve(llm, [prompt], GREEDY)[0].num_cached_tokens == 0
    off = engine(tiny_models["qwen3"], enable_prefix_caching=False)
    assert [serve(off, [prompt], GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]
    assert token_ids(serve(off, [prompt], GREEDY)) == [wanted]


@pytest.mark.parametrize("fault", ["none", "late", "failing"])
def test_evicted_prefixes_are_found_on_the_host(fault: str, tiny_models: Models, tiny_cases: Cases) -> None:
    """A device pool for about two requests and a large host pool; a copy that fails costs a computation and nothing else."""
    cases = tiny_cases["qwen3"][:6]
    llm = engine(tiny_models["qwen3"], 320, kv_offloading_size=4096 * TOKEN)
    wraps = {"none": lambda c: c, "late": lambda c: LateCopier(c, lambda: 3), "failing": lambda c: FailingCopier(c, flip)}
    rng = np.random.default_rng(0)

    def flip(side: object) -> bool:
        return bool(rng.random() < 0.5)

    with use_copier(llm, wraps[fault]):
        for i in range(3):
            out = serve(llm, [p for p, _ in cases], GREEDY, arrivals=[40 * j for j in range(6)], after_step=poison_free_pages)
            assert token_ids(out) == [ids for _, ids in cases]
            if i and fault != "failing":
                assert sum(o.num_cached_tokens for o in out) > sum(len(p) for p, _ in cases) // 2
    stats = llm.stats()
    assert stats["spilled_pages"] > 0
    assert (stats["failed_copies"] > 0) is (fault == "failing")
    llm.reset_prefix_cache()
    assert_idle(llm)
    assert llm.engine.scheduler.memory.host.num_free == stats["host_pages_total"]


def test_nan_is_never_shared(tiny_models: Models) -> None:
    """Pages of a request whose logits became NaN are not cached; the same text still fails, and others are right."""
    from sparsespec import NumericalError
    from sparsespec.testing import scripted

    llm = LLM(scripted(lambda token, position: None if token == 20 else (token + 1) % 60), kv_cache_tokens=512, max_model_len=128,
              page_size=1, speculative_config=speculate(0))
    with pytest.raises(NumericalError):
        llm.generate([10, 11, 12], SamplingParams(temperature=0), use_tqdm=False)
    cached = llm.stats()["cached_pages"]
    assert cached <= 3
    assert_idle(llm)


# -- weights ---------------------------------------------------------------------------------------------------------


def tensors(seed: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(str(tiny_qwen3(seed) / "model.safetensors"))


@pytest.fixture
def own_model() -> LoadedModel:
    """A model that no other test sees, as its weights change."""
    return load_model(LoadConfig(model=str(tiny_path("qwen3")), skip_tokenizer_init=True, device="cpu"))


@pytest.fixture(scope="module")
def other_output() -> list[int]:
    """What the weights of seed 5 say to PROMPT."""
    llm = LLM(str(tiny_qwen3(5)), skip_tokenizer_init=True, device="cpu", kv_cache_tokens=1024, max_model_len=256)
    return token_ids(serve(llm, [PROMPT], GREEDY))[0]


PROMPT = list(range(40, 100))


@pytest.mark.parametrize("form", ["path", "dict", "pairs"])
def test_new_weights_take_effect_and_old_kv_is_forgotten(form: str, own_model: LoadedModel, other_output: list[int]) -> None:
    llm, sharer = engine(own_model), engine(own_model)
    old = token_ids(serve(llm, [PROMPT], GREEDY))[0]
    assert token_ids(serve(sharer, [PROMPT], GREEDY)) == [old]
    assert old != other_output
    llm.update_weights(str(tiny_qwen3(5)) if form == "path" else tensors(5) if form == "dict" else iter(tensors(5).items()))
    for each in (llm, sharer):
        out = serve(each, [PROMPT], GREEDY)[0]
        assert (out.outputs[0].token_ids, out.num_cached_tokens) == (other_output, 0)
    llm.update_weights(tensors(0))
    assert token_ids(serve(llm, [PROMPT], GREEDY)) == [old]


def test_an_update_that_fails_stops_the_engine_until_one_works(own_model: LoadedModel, other_output: list[int]) -> None:
    llm = engine(own_model)
    incomplete = tensors(5)
    incomplete.pop("model.norm.weight")
    with pytest.raises(ModelLoadError):
        llm.update_weights(incomplete)
    with pytest.raises(StateError, match="update_weights"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
    llm.update_weights(tensors(5))
    assert token_ids(serve(llm, [PROMPT], GREEDY)) == [other_output]


def test_weights_and_memory_stay_while_requests_run(own_model: LoadedModel) -> None:
    llm = engine(own_model)
    llm.engine.add_request("a", PROMPT, GREEDY)
    for call in (lambda: llm.update_weights(tensors(5)), llm.sleep):
        with pytest.raises(StateError) as info:
            call()
        assert info.value.remedy
    llm.engine.abort("a")
    assert_idle(llm)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_waking_up_goes_on(level: int, own_model: LoadedModel, other_output: list[int]) -> None:
    llm = engine(own_model)
    old = token_ids(serve(llm, [PROMPT], GREEDY))[0]
    llm.sleep(level)
    assert llm.engine.pool.data.untyped_storage().nbytes() == 0
    if level == 2:
        assert own_model.model.embedding.untyped_storage().nbytes() == 0
    with pytest.raises(StateError, match="asleep"):
        llm.engine.add_request("a", PROMPT, GREEDY)
    llm.wake_up()
    if level == 2:
        with pytest.raises(StateError, match="update_weights"):
            llm.engine.add_request("a", PROMPT, GREEDY)
        llm.update_weights(tensors(5))
    out = serve(llm, [PROMPT], GREEDY)[0]
    assert out.num_cached_tokens == 0
    assert out.outputs[0].token_ids == (old if level == 1 else other_output)


def test_levels_of_sleep(own_model: LoadedModel) -> None:
    llm = engine(own_model)
    for level in (0, 3, True):
        with pytest.raises(InvalidValueError) as info:
            llm.sleep(level)
        assert info.value.field == "level"
