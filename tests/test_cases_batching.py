"""What else is in the batch, and how much memory there is, changes no request's text: case T48; T22 is in test_cases_kv.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from driving import completions, serve, speculate, token_ids
from reference import PROMPTS, tiny_path, tiny_prompts
from sparsespec import LLM, SamplingParams
from sparsespec.config.engine import LoadConfig
from sparsespec.loader import load_model
from sparsespec.loader.loaded import LoadedModel

pytestmark = pytest.mark.usefixtures("one_thread")


def test_requests_that_fit_one_at_a_time(tiny_models: dict[str, LoadedModel], tiny_cases: dict[str, Any]) -> None:
    """A pool that holds a single request: the others wait, nothing is lost, and reserving ahead needs no preemption."""
    cases = tiny_cases["llama"]
    most = max(len(p) for p, _ in cases) + 64
    for policy in ("recompute", "reserve"):
        llm = LLM(tiny_models["llama"], kv_cache_tokens=-(-most // 16) * 16, max_model_len=256,
                  speculative_config=speculate(8, kv_policy=policy))
        outputs = serve(llm, [p for p, _ in cases], SamplingParams(temperature=0, max_tokens=64))
        assert token_ids(outputs) == [ids for _, ids in cases]
        assert policy == "recompute" or llm.stats()["num_preemptions"] == 0


def bitwise(llm: LLM, prompts: list[list[int]], place: int, tokens: int, arrivals: list[int]) -> tuple[list[int], list[float]]:
    """Ids and log probabilities of the request at `place`."""
    params = [SamplingParams(temperature=0 if i == place or i % 2 else 0.9, max_tokens=tokens, logprobs=0, ignore_eos=True)
              for i in range(len(prompts))]
    c = completions(serve(llm, prompts, params, arrivals))[place]
    assert c.logprobs is not None
    return c.token_ids, [row[t].logprob for t, row in zip(c.token_ids, c.logprobs, strict=True)]


def check_invariance(loaded: LoadedModel, prompt: list[int], others: list[list[int]], tokens: int, drafts: tuple[int, ...],
                     budget: int) -> None:
    """Alone, in batches of 2, 4 and 8, first and last, with any k and chunk size: not one bit changes."""
    rng = np.random.default_rng(0)
    wanted = None
    for k in drafts:
        llm = LLM(loaded, deterministic=True, kv_cache_tokens=4096, max_model_len=384, max_num_batched_tokens=budget + k,
                  speculative_config=speculate(k, min_budget=16))
        for batch in (1, 2, 4, 8):
            for place in {0, batch - 1}:
                neighbours = [others[i] for i in rng.permutation(len(others))[:batch - 1]]
                prompts = [*neighbours[:place], prompt, *neighbours[place:]]
                found = bitwise(llm, prompts, place, tokens, [int(i) for i in rng.integers(0, 4, batch)])
                wanted = wanted or found
                assert found == wanted, (k, batch, place)
        if k:
            assert 0 < llm.stats()["num_accepted_tokens"] < llm.stats()["num_draft_tokens"]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_t48_deterministic_mode_is_bitwise(kind: str) -> None:
    loaded = load_model(LoadConfig(model=str(tiny_path(kind)), skip_tokenizer_init=True, device="cpu"), deterministic=True)
    prompt, *others = tiny_prompts(9, seed=11)
    check_invariance(loaded, prompt, others, 32, (0, 4, 8), 100)


def test_t48_deterministic_mode_is_bitwise_on_smollm2() -> None:
    loaded = load_model(LoadConfig(dtype="float32", device="cpu"), deterministic=True)
    prompt, *others = [loaded.tokenizer(p)["input_ids"] * 2 for p in PROMPTS[:9]]
    check_invariance(loaded, prompt, others, 12, (0, 4), 64)
