"""speculative_config: presets, vLLM's names, values that contradict or do not fit, and what a request may ask for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from policies import target
from sparsespec import LLM, SamplingParams
from sparsespec.config.model import ModelConfig
from sparsespec.config.speculative import PER_REQUEST, SpeculativeConfig
from sparsespec.core.errors import InvalidValueError, UnknownFieldError
from sparsespec.core.request import DraftTraits
from sparsespec.spec.base import DraftPolicy, ProposeContext
from sparsespec.spec.registry import POLICIES, PolicySet, register

MODEL = ModelConfig("llama", 50, 48, 48, 3, 6, 2, 8)


def config(**values: Any) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict(values)


def test_defaults() -> None:
    c = config()
    assert (c.method, c.num_speculative_tokens, c.sparse_attn_ratio, c.min_budget) == ("pillar", 8, 0.05, 128)
    assert SpeculativeConfig.from_dict(None) == c


@pytest.mark.parametrize(("method", "expected"), [
    ("specattn", {"sparse_attn_ratio": 0.07, "min_budget": 256, "num_speculative_tokens": 8}),
    ("ngram", {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 7}),
    ("eagle3", {"num_speculative_tokens": 3}),
    ("triforce", {"num_speculative_tokens": 6, "num_proposed_tokens": 1}),
    ("magicdec", {"num_sink_tokens": 32, "magicdec_variant": "stream"}),
    ("window", {"num_sink_tokens": 4, "num_speculative_tokens": 8}),
])
def test_presets_are_what_the_authors_ran(method: str, expected: dict[str, Any]) -> None:
    c = config(method=method)
    assert {key: getattr(c, key) for key in expected} == expected


def test_own_values_win_over_presets() -> None:
    assert config(method="specattn", sparse_attn_ratio=0.2).sparse_attn_ratio == 0.2
    assert config(method="ngram", num_speculative_tokens=9).num_speculative_tokens == 9


@pytest.mark.parametrize("values", [
    {"method": "sparse_attn"}, {"sparse_attn": True}, {"method": "sparse_attn", "sparse_attn": True},
    {"sparse_attn_algorithm": "specattn"}, {"sparse_attn": True, "method": "specattn"},
    {"method": "sparse_attn", "sparse_attn_algorithm": "specattn"},
])
def test_vllms_names(values: dict[str, Any]) -> None:
    assert SpeculativeConfig.from_dict(values) == config(method="specattn")
    assert SpeculativeConfig.from_dict({**values, "sparse_attn_ratio": 0.1}) == config(method="specattn", sparse_attn_ratio=0.1)


def test_vllms_names_for_other_methods() -> None:
    assert config(sparse_attn=True, sparse_attn_algorithm="pillar") == config()
    assert config(method="sparse_attn", sparse_attn_algorithm="window") == config(method="window")
    assert config(sparse_attn=False, method="ngram") == config(method="ngram")


@pytest.mark.parametrize("values", [
    {"method": "ngram", "sparse_attn": True}, {"method": "window", "sparse_attn_algorithm": "specattn"},
    {"sparse_attn": False, "sparse_attn_algorithm": "specattn"}, {"method": "sparse_attn", "sparse_attn": False},
    {"sparse_attn": False}, {"sparse_attn": "yes"}, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 65},
    {"num_speculative_tokens": 2.5}, {"num_speculative_tokens": True},
    {"sparse_attn_ratio": -0.1}, {"sparse_attn_ratio": 5}, {"sparse_attn_ratio": math.nan}, {"sparse_attn_ratio": "0.1"},
    {"min_budget": 0}, {"sparse_attn_mass": 1.1}, {"score_rows": "some"}, {"score_group": "sum"}, {"magicdec_variant": "x"},
    {"prompt_lookup_min": 5, "prompt_lookup_max": 4}, {"num_proposed_tokens": 0}, {"proposer": "pillar"}, {"num_sink_tokens": -1},
    {"method": 5}, {"method": ["pillar"]}, {"model": 5}, {"adaptive": 1}, {"synthetic_acceptance": 2}, {"schedule": "x"},
])
def test_values_that_contradict_or_do_not_fit(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError) as error:
        SpeculativeConfig.from_dict(values)
    assert error.value.field.startswith("speculative_config.")
    assert error.value.remedy


def test_unknown_keys_and_methods() -> None:
    with pytest.raises(UnknownFieldError, match="num_spec_tokens"):
        config(num_spec_tokens=3)
    with pytest.raises(InvalidValueError, match="Choose from: eagle3"):
        PolicySet(config(method="pilar"), MODEL)
    with pytest.raises(InvalidValueError, match="not a mapping"):
        SpeculativeConfig.from_dict("pillar")  # type: ignore[arg-type]


# -- what a request may ask for ------------------------------------------------------------------------------------------


def test_a_request_changes_what_it_names_and_keeps_the_rest() -> None:
    policies = PolicySet(config(num_speculative_tokens=6, min_budget=40), MODEL)
    assert policies.traits(None) == policies.traits({}) == DraftTraits(0, 6, True, False, 7)
    index = policies.traits({"sparse_attn_ratio": 0.3}).policy
    assert policies[index].config == config(num_speculative_tokens=6, min_budget=40, sparse_attn_ratio=0.3)
    assert policies.traits({"sparse_attn_ratio": 0.3}).policy == index
    assert policies.traits({"min_budget": 40}).policy == 0
    assert policies.traits({"num_speculative_tokens": 2}).k == 2
    assert policies.traits({"method": "none"}) == DraftTraits(policies.traits({"method": "none"}).policy, 0, False, False)


def test_another_method_comes_with_its_preset_within_the_engines_k() -> None:
    policies = PolicySet(config(num_speculative_tokens=5), MODEL)
    assert policies.traits({"method": "ngram"}).k == 4
    assert policies.traits({"method": "triforce"}).k == 5
    found = policies[policies.traits({"sparse_attn_algorithm": "specattn"}).policy]
    assert (found.name, found.config.sparse_attn_ratio) == ("specattn", 0.07)


@pytest.mark.parametrize(("asked", "said"), [
    ({"num_spec_tokens": 3}, "unknown"), ({"schedule": "lockstep"}, "fixed when the engine starts"),
    ({"adaptive": False}, "fixed when the engine starts"), ({"model": "x"}, "fixed when the engine starts"),
    ({"num_speculative_tokens": 9}, "more than the engine's 8"), ({"method": "window", "num_speculative_tokens": 9}, "more than"),
    ({"method": "x"}, "unknown draft policy"), ({"method": "eagle3"}, "without a draft head"), ({"min_budget": 0}, "out of range"),
    ({"sparse_attn": True, "method": "ngram"}, "contradicts"),
])
def test_what_a_request_may_not_ask_for(asked: dict[str, Any], said: str) -> None:
    assert set(asked) & PER_REQUEST or said.startswith(("unknown", "fixed"))
    llm = LLM(target(), kv_cache_tokens=256, max_model_len=64)
    with pytest.raises(InvalidValueError, match=said):
        llm.generate([1, 2, 3], SamplingParams(speculative_config=asked), use_tqdm=False)
    assert not llm.engine.has_work()
    assert len(llm.engine.policies) == 1


def test_an_engine_without_speculation() -> None:
    policies = PolicySet(config(method="none"), MODEL)
    with pytest.raises(InvalidValueError, match="without speculation"):
        policies.traits({"method": "pillar"})
    assert policies.traits({"method": "none"}).k == 0


def test_policies_of_requests_that_left_do_not_pile_up() -> None:
    policies = PolicySet(config(), MODEL)
    held = policies.traits({"min_budget": 7}).policy
    policies.hold(held)
    for budget in range(1000, 2000):
        index = policies.traits({"min_budget": budget}).policy
        policies.hold(index)
        assert policies[index].config.min_budget == budget
        policies.release(index)
    assert len(policies) <= 70
    assert policies.traits({"min_budget": 7}).policy == held
    assert policies[held].config.min_budget == 7
    assert policies.traits({"min_budget": 1999}).policy == index  # kept for the next request
    assert policies[0].config == config()


def test_an_engine_forgets_the_policies_of_its_requests() -> None:
    llm = LLM(target(), kv_cache_tokens=1024, max_model_len=64)
    plain = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0].outputs[0].token_ids
    for start in range(0, 160, 8):
        params = [SamplingParams(temperature=0, max_tokens=12, speculative_config={"min_budget": 1 + start + i}) for i in range(8)]
        outputs = llm.generate([[5, 6, 7]] * 8, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [plain] * 8
    assert len(llm.engine.policies) <= 80


# -- a policy of one's own -------------------------------------------------------------------------------------------------


class Repeat(DraftPolicy):
    """Proposes the last token again."""

    name = "repeat"
    proposes = True

    def propose(self, context: ProposeContext) -> list[list[int]]:
        return [[(r.prompt_token_ids + r.output_token_ids)[-1]] * int(most)
                for r, most in zip(context.requests, context.most, strict=True)]


def test_registering_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsespec.spec.registry.POLICIES", dict(POLICIES))
    register("repeat", Repeat)
    with pytest.raises(InvalidValueError, match="already a draft policy"):
        register("repeat", Repeat)
    params = SamplingParams(temperature=0, max_tokens=20)
    outputs = [LLM(target(), kv_cache_tokens=256, max_model_len=64, speculative_config=c).generate([5, 6], params, use_tqdm=False)
               for c in ({"method": "none"}, {"method": "repeat", "adaptive": False})]
    assert outputs[0][0].outputs[0].token_ids == outputs[1][0].outputs[0].token_ids
    assert outputs[1][0].metrics.num_draft_tokens > 20
