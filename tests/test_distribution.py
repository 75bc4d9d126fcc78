"""Sampled output follows the model's own distribution under speculation: case T4, by the joint distribution of three tokens.

A vocabulary of 16 gives 4096 sequences, whose probabilities Hugging Face's forward pass tells exactly. All temperatures,
and a greedy request, run in one batch. A chi-square test that a broken sampler passes would show nothing, so the same
test is run on samplers broken on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from driving import completions, serve
from reference import Reference
from sparsespec import LLM, SamplingParams
from sparsespec.config.engine import LoadConfig
from sparsespec.loader import load_model
from sparsespec.loader.loaded import LoadedModel
from sparsespec.runner import decide
from sparsespec.sampling.rng import inverse_cdf
from sparsespec.sampling.sampler import Sampler
from sparsespec.testing import override_drafts, tiny_qwen3
from sparsespec.verify.result import VerifyResult
from stat_utils import BROKEN, SOUND, chi_square

V = 16
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = np.random.default_rng(0).integers(0, V, 12).tolist()
MODES = (  # test seed, drafts a round, entries that they see, schedule
    (0, 3, 1, "lockstep"), (1, 4, 2, "unified"), (2, 2, 1, "lockstep"))


@cache
def model() -> LoadedModel:
    return load_model(LoadConfig(model=str(path()), skip_tokenizer_init=True, device="cpu"))


def path() -> Any:
    return tiny_qwen3(6, vocab_size=V, max_position_embeddings=128)


@cache
def next_logits() -> tuple[Tensor, Tensor, Tensor]:
    """Hugging Face's logits after the prompt and after each one and two tokens more: [1, V], [V, V], [V², V]."""
    hf = Reference.directory(path()).model
    two = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    with torch.inference_mode():
        return tuple(hf(torch.cat((torch.tensor(PROMPT).expand(len(tail), -1), tail), 1), use_cache=False).logits[:, -1]  # type: ignore[return-value]
                     for tail in (torch.zeros(1, 0, dtype=torch.int64), two[:V, 1:], two))


def joint(change: Callable[[Tensor], Tensor]) -> Tensor:
    """Probabilities [V³] of three tokens; `change` turns logits into the logits that are sampled from."""
    first, second, third = (change(x.double()).softmax(-1) for x in next_logits())
    return (first.view(V, 1, 1) * second.view(V, V, 1) * third.view(V, V, V)).flatten()


def sample(params: list[SamplingParams], seed: int, k: int, budget: int, schedule: str,
           drafts: Callable[[str, int], int] | None = None, verification: str = "sync") -> list[Tensor]:
    """Three tokens of every completion, one number each: int64 [n] a request. All run in one engine and share its batches."""
    config = {"num_speculative_tokens": k, "min_budget": budget, "sparse_attn_ratio": 0.0, "adaptive": False, "schedule": schedule,
              "verification": verification}
    llm = LLM(model(), max_num_seqs=256, kv_cache_tokens=256 * 48, max_num_batched_tokens=8192, seed=seed,
              speculative_config=config)
    if drafts is None:
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        assert llm.stats()["num_accepted_tokens"] > 0.1 * llm.stats()["num_draft_tokens"] > 100
    else:
        with override_drafts(llm, drafts):
            outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    place = torch.tensor([V * V, V, 1])
    return [torch.tensor([c.token_ids[:3] for c in o.outputs]) @ place for o in outputs]


def p_values(n: int, mode: tuple[int, int, int, str], seeded: bool, temperatures: tuple[float, ...] = TEMPERATURES,
             copies: int = 1, verification: str = "sync") -> list[float]:
    """By temperature, for `copies` requests of n draws each. Asserts on the way that greedy neighbours get the greedy tokens."""
    seed, k, budget, schedule = mode
    each = [t for t in temperatures for _ in range(copies)]
    params = [SamplingParams(temperature=t, n=n, max_tokens=k + 2, seed=10**6 * (10 * seed + i) if seeded else None)
              for i, t in enumerate(each)]
    *drawn, best = sample([*params, SamplingParams(temperature=0, n=8, max_tokens=k + 2)], seed, k, budget, schedule,
                          verification=verification)
    first, second, third = (x.argmax(-1) for x in next_logits())
    one, two = int(first[0]), int(second[first[0]])
    assert best.unique().tolist() == [V * V * one + V * two + int(third[V * one + two])]
    return [chi_square(torch.cat(drawn[i * copies:(i + 1) * copies]), joint(lambda x, t=t: x / t))  # type: ignore[misc]
            for i, t in enumerate(temperatures)]


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_t04_every_request_has_its_own_temperature(mode: tuple[int, int, int, str], seeded: bool) -> None:
    assert min(p_values(1000, mode, seeded)) >= SOUND


@pytest.mark.parametrize("verification", ["delayed", "device"])
def test_t04_with_results_that_come_late(verification: str) -> None:
    for mode in MODES[:2]:
        assert min(p_values(1000, mode, False, verification=verification)) >= SOUND


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_t04_with_20_000_draws(mode: tuple[int, int, int, str], seeded: bool) -> None:
    assert min(p_values(10_000, mode, seeded, copies=2)) >= SOUND


@pytest.mark.parametrize("seeded", [False, True])
def test_truncation_and_bias_on_both_sides(seeded: bool) -> None:
    """top_k, top_p, min_p and a bias, each for its own request: what is drawn from is what they make of the target."""
    def keep(x: Tensor, cut: Tensor) -> Tensor:
        return x.masked_fill(cut, -torch.inf)

    def top_p(x: Tensor) -> Tensor:
        order = x.argsort(-1, descending=True)
        spent = x.softmax(-1).gather(1, order).cumsum(-1) - x.softmax(-1).gather(1, order)
        return keep(x, torch.zeros_like(x, dtype=torch.bool).scatter(1, order, spent >= 0.8))

    def bias(x: Tensor) -> Tensor:
        return x + torch.tensor([2.0 if i == 3 else -1.0 if i == 5 else 0.0 for i in range(V)], dtype=x.dtype)

    wanted: list[tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = [
        ({"top_k": 4}, lambda x: keep(x, x < x.topk(4).values[:, -1:])), ({"top_p": 0.8}, top_p),
        ({"min_p": 0.1}, lambda x: keep(x, x < x.amax(-1, keepdim=True) + math.log(0.1))),
        ({"logit_bias": {3: 2.0, 5: -1.0}}, bias)]
    params = [SamplingParams(n=1000, max_tokens=5, seed=10**6 * i if seeded else None, **kw) for i, (kw, _) in enumerate(wanted)]
    for drawn, (kw, change) in zip(sample(params, 0, 3, 1, "lockstep"), wanted, strict=True):
        assert chi_square(drawn, joint(change)) >= SOUND, kw
        assert chi_square(drawn, joint(lambda x: x)) < SOUND, kw


@pytest.mark.parametrize("seeded", [False, True])
def test_forced_drafts_do_not_bend_the_distribution(seeded: bool) -> None:
    """Drafts from elsewhere count as certain, and verification allows for it."""
    temperatures = (0.7, 1.5)
    params = [SamplingParams(temperature=t, n=1500, max_tokens=5, seed=10**6 * i if seeded else None)
              for i, t in enumerate(temperatures)]
    outputs = sample(params, 4, 3, 1, "lockstep", lambda request_id, position: position % V)
    for drawn, t in zip(outputs, temperatures, strict=True):
        assert chi_square(drawn, joint(lambda x, t=t: x / t)) >= SOUND  # type: ignore[misc]


# -- samplers broken on purpose ----------------------------------------------------------------------------------------

sound_rejection, sound_match = decide.rejection, decide.match


def accept_always(drafts: Tensor, count: Tensor, p: Tensor, q: Tensor | None, accept: Tensor, *u: Tensor) -> VerifyResult:
    return sound_rejection(drafts, count, p, q, torch.full_like(accept, 1e-300), *u)


def no_residual(drafts: Tensor, count: Tensor, p: Tensor, q: Tensor | None, accept: Tensor, *u: Tensor) -> VerifyResult:
    """Draws from p where a draft was rejected."""
    result = sound_rejection(drafts, count, p, q, accept, *u)
    row = torch.arange(len(drafts))
    result.tokens[row, result.num_accepted] = inverse_cdf(p[row, result.num_accepted], u[-1])
    return result


def tolerant(drafts: Tensor, count: Tensor, p: Tensor, q: Tensor | None, accept: Tensor, *u: Tensor) -> VerifyResult:
    """Accepts more than it may, and draws from the right residual."""
    return sound_rejection(drafts, count, p, q, accept / 2, *u)


def certain(drafts: Tensor, count: Tensor, p: Tensor, q: Tensor | None, accept: Tensor, *u: Tensor) -> VerifyResult:
    """Treats drafts as certain, which accepts less and is as sound."""
    return sound_rejection(drafts, count, p, None, accept, *u)


@pytest.mark.parametrize("broken", [accept_always, no_residual, tolerant])
def test_a_broken_rejection_sampler_fails(broken: Callable[..., VerifyResult], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "rejection", broken)
    assert min(p_values(1500, MODES[0], False, (0.3, 0.7))) < BROKEN


def test_drafts_called_certain_are_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "rejection", certain)
    assert min(p_values(1500, MODES[0], False, (0.3, 0.7))) >= SOUND


def test_a_drafter_that_ignores_the_temperature_is_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts need not follow the request's temperature as long as verification knows what they were drawn from."""
    truncated = Sampler.truncated_logits

    def hot(self: Sampler, processed: Tensor, best: Tensor, bad: Tensor, random: Tensor, rows: Any) -> Tensor:
        return truncated(self, processed, best, bad, random, rows) * (0.5 if drafting else 1.0)

    drafting = False
    draft = decide.Decider.draft

    def mark(*args: Any) -> Tensor:
        nonlocal drafting
        drafting = True
        try:
            return draft(*args)
        finally:
            drafting = False

    monkeypatch.setattr(Sampler, "truncated_logits", hot)
    monkeypatch.setattr(decide.Decider, "draft", mark)
    assert min(p_values(1500, MODES[0], False, (0.3, 0.7))) >= SOUND


def test_a_target_that_ignores_the_temperature_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    truncated = Sampler.truncated_logits
    monkeypatch.setattr(Sampler, "truncated_logits", lambda *args: truncated(*args) * 0.8)
    for seeded in (False, True):
        assert max(p_values(1500, MODES[0], seeded, (0.7, 1.5))) < BROKEN


def test_a_broken_coupled_sampler_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded requests that take every draft follow the sparse drafter and not the target."""
    def accept_drafts(drafts: Tensor, count: Tensor, target: Tensor) -> VerifyResult:
        return sound_match(drafts, count, torch.cat((drafts, target.gather(1, count[:, None])), 1))

    monkeypatch.setattr(decide, "match", accept_drafts)
    temperatures = (0.3, 0.7)
    params = [SamplingParams(temperature=t, n=1500, max_tokens=5, seed=10**6 * i) for i, t in enumerate(temperatures)]
    drawn = sample(params, 0, 3, 1, "lockstep")
    assert min(chi_square(d, joint(lambda x, t=t: x / t)) for d, t in zip(drawn, temperatures, strict=True)) < BROKEN  # type: ignore[misc]


def test_seeded_requests_with_one_seed_agree_and_others_do_not() -> None:
    llm = LLM(model(), kv_cache_tokens=4096, speculative_config={"num_speculative_tokens": 3, "min_budget": 1, "adaptive": False})
    params = [SamplingParams(temperature=1.5, seed=s, max_tokens=24) for s in (1, 1, 2, 3)]
    first, again, second, third = (tuple(c.token_ids) for c in completions(serve(llm, [PROMPT] * 4, params, [0, 2, 0, 3])))
    assert first == again
    assert len({first, second, third}) == 3
