"""Bad input gives a typed error that names field, value and remedy, and the other requests of the batch are served right."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from driving import assert_idle, serve, speculate, token_ids
from reference import tiny_path
from sparsespec import (
    LLM,
    BatchError,
    CapacityError,
    ContextLengthError,
    InvalidValueError,
    ModelLoadError,
    NumericalError,
    SamplingParams,
    UnknownFieldError,
)
from sparsespec.loader import default_model_path
from sparsespec.loader.loaded import LoadedModel
from sparsespec.testing import override_drafts, scripted

Cases = dict[str, list[tuple[list[int], list[int]]]]
pytestmark = pytest.mark.usefixtures("one_thread")


def assert_names(error: InvalidValueError, field: str, value: Any = None) -> None:
    """The error says which setting, what was given and what to do, as attributes and in its text."""
    assert error.field == field
    assert error.remedy
    assert field in str(error)
    assert error.remedy in str(error)
    if value is not None:
        assert error.value == value
        assert str(value)[:50] in str(error)


def engine(tiny_models: dict[str, LoadedModel], **settings: Any) -> LLM:
    defaults = {"kv_cache_tokens": 1024, "max_model_len": 160, "speculative_config": speculate(4)}
    return LLM(tiny_models["llama"], **{**defaults, **settings})


# -- model files -----------------------------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:len(data) // 2])


def break_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 100)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("damage", [cut_short, break_header, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_directory(damage: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_path("llama"), model)
    damage(model / name)
    with pytest.raises(ModelLoadError) as info:
        LLM(str(model), skip_tokenizer_init=True)
    assert_names(info.value, "model")
    assert "model" in str(info.value.value)


@pytest.mark.parametrize("size", [0, 3, 1000, 2_000_000, 50_000_000])
def test_a_truncated_gguf_file(size: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with default_model_path().open("rb") as source:
        path.write_bytes(source.read(size))
    with pytest.raises(ModelLoadError) as info:
        LLM(str(path))
    assert_names(info.value, "model", str(path))


def test_no_such_model() -> None:
    with pytest.raises(ModelLoadError) as info:
        LLM("/no/such/model")
    assert_names(info.value, "model", "/no/such/model")


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "kind", "field", "value"), [
    ({"speculative_config": {"num_speculativ_tokens": 8}}, UnknownFieldError, "speculative_config.num_speculativ_tokens", 8),
    ({"speculative_config": {"method": "magic"}}, InvalidValueError, "speculative_config.method", "magic"),
    ({"speculative_config": {"num_speculative_tokens": 0}}, InvalidValueError, "speculative_config.num_speculative_tokens", 0),
    ({"speculative_config": {"num_speculative_tokens": 32}, "max_model_len": 32}, InvalidValueError,
     "speculative_config.num_speculative_tokens", 32),
    ({"speculative_config": {"sparse_attn_ratio": 1.5}}, InvalidValueError, "speculative_config.sparse_attn_ratio", 1.5),
    ({"max_model_len": 10**6}, InvalidValueError, "max_model_len", 10**6),
    ({"page_size": 0}, InvalidValueError, "page_size", 0),
    ({"kv_cache_tokens": 3}, InvalidValueError, "kv_cache_tokens", 3),
    ({"max_modell_len": 5}, UnknownFieldError, "max_modell_len", 5),
])
def test_settings(settings: dict[str, Any], kind: type[InvalidValueError], field: str, value: Any,
                  tiny_models: dict[str, LoadedModel]) -> None:
    with pytest.raises(kind) as info:
        engine(tiny_models, **settings)
    assert_names(info.value, field, value)


@pytest.mark.parametrize(("params", "field"), [
    ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"min_p": 2.0}, "min_p"), ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"), ({"logprobs": -1}, "logprobs"), ({"stop": ""}, "stop"), ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"seed": "x"}, "seed"), ({"logit_bias": {1: 1000.0}}, "logit_bias")])
def test_sampling_params(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValueError) as info:
        SamplingParams(**params)
    assert_names(info.value, field)


def test_unknown_sampling_parameter() -> None:
    with pytest.raises(UnknownFieldError) as info:
        SamplingParams.from_dict({"temprature": 1})
    assert_names(info.value, "temprature", 1)


# -- requests --------------------------------------------------------------------------------------------------------

GOOD = SamplingParams(temperature=0, max_tokens=40)


@pytest.mark.parametrize(("prompt", "params", "kind", "field"), [
    ([], GOOD, InvalidValueError, "prompt"),
    ({"prompt_token_ids": []}, GOOD, InvalidValueError, "prompt"),
    ({"promt": "x"}, GOOD, InvalidValueError, "prompt"),
    ("text without a tokenizer", GOOD, InvalidValueError, "prompt"),
    ([1, 256], GOOD, InvalidValueError, "prompt_token_ids"),
    ([1, -1], GOOD, InvalidValueError, "prompt_token_ids"),
    ([1] * 160, GOOD, ContextLengthError, "prompt"),
    ([1] * 1600, GOOD, ContextLengthError, "prompt"),
    ([1], SamplingParams(stop="x"), InvalidValueError, "stop"),
    ([1], SamplingParams(stop_token_ids=[256]), InvalidValueError, "stop_token_ids"),
    ([1], SamplingParams(allowed_token_ids=[1, 999]), InvalidValueError, "allowed_token_ids"),
    ([1], SamplingParams(structured_outputs={"json": {}}), InvalidValueError, "structured_outputs"),
])
def test_one_bad_request_among_good_ones(prompt: Any, params: SamplingParams, kind: type[InvalidValueError], field: str,
                                         tiny_models: dict[str, LoadedModel], tiny_cases: Cases) -> None:
    """Alone it raises; among others, they finish with right outputs and the error tells which one failed."""
    llm = engine(tiny_models)
    cases = tiny_cases["llama"][:3]
    with pytest.raises(kind) as alone:
        llm.generate({"prompt_token_ids": prompt} if prompt == [] else prompt, params, use_tqdm=False)
    assert_names(alone.value, field)
    prompts = [cases[0][0], prompt, cases[1][0], cases[2][0]]
    with pytest.raises(BatchError) as info:
        llm.generate(prompts, [GOOD, params, GOOD, GOOD], use_tqdm=False)
    assert list(info.value.errors) == [1]
    assert isinstance(info.value.errors[1], kind)
    assert info.value.outputs[1] is None
    assert token_ids([o for o in info.value.outputs if o is not None]) == [ids[:40] for _, ids in cases]
    assert_idle(llm)
    assert token_ids(llm.generate([cases[0][0]], GOOD, use_tqdm=False)) == [cases[0][1][:40]]


def test_prompt_lengths_at_the_limit(tiny_models: dict[str, LoadedModel], tiny_cases: Cases) -> None:
    """One token below the limit gives one token; at it and beyond, an error while a running request goes on."""
    llm = engine(tiny_models)
    running, wanted = tiny_cases["llama"][0]
    llm.engine.add_request("running", running, GOOD)
    for _ in range(4):
        llm.engine.step()
    llm.engine.add_request("one less", [5] * 159, SamplingParams(temperature=0, max_tokens=50))
    for length in (160, 161, 1600):
        with pytest.raises(ContextLengthError) as info:
            llm.engine.add_request("too long", [5] * length, GOOD)
        assert_names(info.value, "prompt")
        assert str(length) in str(info.value)
        assert "160" in str(info.value)
    done = {}
    while llm.engine.has_work():
        done.update((o.request_id, o.outputs[0]) for o in llm.engine.step())
    assert set(done) == {"running", "one less"}
    assert done["running"].token_ids == wanted[:40]
    assert (len(done["one less"].token_ids), done["one less"].finish_reason) == (1, "length")


def test_a_request_that_can_never_fit(tiny_models: dict[str, LoadedModel], tiny_cases: Cases) -> None:
    """The prompt fits the pool, prompt and max_tokens do not: an error at once, and neighbours are served."""
    cases = sorted(tiny_cases["llama"], key=lambda c: len(c[0]))[:3]
    llm = engine(tiny_models, kv_cache_tokens=128)
    with pytest.raises(BatchError) as info:
        llm.generate([*(p for p, _ in cases), [1] * 60], [*[GOOD] * 3, SamplingParams(max_tokens=90)], use_tqdm=False)
    assert isinstance(info.value.errors[3], CapacityError)
    assert_names(info.value.errors[3], "max_tokens", 90)
    assert token_ids(info.value.outputs[:3]) == [ids[:40] for _, ids in cases]


@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("at", [0, 1, 2, 5, 12])
def test_nan_in_the_logits_of_one_request(at: int, k: int) -> None:
    """It ends with an error after the tokens that were still good; the others of its batches never notice."""
    loaded = scripted(lambda token, position: None if token == 100 + at else (token + 1) % 256)
    llm = LLM(loaded, kv_cache_tokens=1024, max_model_len=128, speculative_config=speculate(k))
    params = [SamplingParams(temperature=t, seed=seed, max_tokens=30) for t, seed in ((0, None), (0, None), (1.0, None), (0.7, 1))]
    with pytest.raises(BatchError) as info:
        llm.generate([[7, 8, 10], [7, 8, 100], [9, 150], [200]], params, use_tqdm=False)
    assert list(info.value.errors) == [1]
    error = info.value.errors[1]
    assert isinstance(error, NumericalError)
    assert error.field == "logits"
    assert error.remedy in str(error)
    assert error.position == 3 + at
    outputs = info.value.outputs
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].token_ids == list(range(101, 101 + at))
    assert token_ids([outputs[0], outputs[2], outputs[3]]) == [
        list(range(11, 41)), list(range(151, 181)), list(range(201, 231))]
    assert_idle(llm)
    assert token_ids(serve(llm, [[20]], SamplingParams(temperature=0, max_tokens=9))) == [list(range(21, 30))]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_behind_a_rejected_draft_is_nobodys(temperature: float, seed: int | None) -> None:
    """Wrong drafts lead where the model gives NaN. Plain decoding never goes there, so neither may the output show it."""
    loaded = scripted(lambda token, position: None if token == 66 else (token + 1) % 60)
    llm = LLM(loaded, kv_cache_tokens=1024, max_model_len=128, speculative_config=speculate(4))
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=30)
    with override_drafts(llm, lambda request_id, position: 66 if position % 3 else None):
        out = token_ids(serve(llm, [[7, 8, 10], [15]], params))
    assert out == [[(11 + i) % 60 for i in range(30)], [(16 + i) % 60 for i in range(30)]]
    assert llm.stats()["num_draft_tokens"] > 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_alone_raises(temperature: float) -> None:
    llm = LLM(scripted(lambda token, position: None), kv_cache_tokens=64, max_model_len=64, speculative_config=speculate(4))
    with pytest.raises(NumericalError) as info:
        llm.generate([1, 2, 3], SamplingParams(temperature=temperature), use_tqdm=False)
    assert info.value.position == 3
    assert_idle(llm)
