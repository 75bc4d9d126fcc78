"""Sampled output has the target's distribution whichever policy drafts: the joint of three tokens, as in test_distribution.

And at each level drafts are distributed as verification is told: where tokens t come from distributions q, the numbers
F_q(t - 1) + u · q(t) are uniform for uniform u. A middle level broken on purpose shows that both tests can see it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from policies import POLICIES, configure, per_request
from reference import Reference
from sparsespec import LLM, SamplingParams
from sparsespec.config.engine import LoadConfig
from sparsespec.loader import load_model
from sparsespec.loader.loaded import LoadedModel
from sparsespec.runner import decide
from sparsespec.runner.decide import Decider
from sparsespec.sampling.rng import inverse_cdf
from sparsespec.spec import quest
from sparsespec.testing import tiny_eagle3, tiny_qwen3
from sparsespec.verify.result import VerifyResult
from stat_utils import BROKEN, SOUND, chi_square

V, K = 16, 4
PATH = tiny_qwen3(6, vocab_size=V, num_layers=3, max_position_embeddings=128)
PROMPT = np.random.default_rng(1).integers(0, V, 37).tolist()
VARIANTS = ("pillar-accepted", "pillar-ends", "specattn-mass", "magicdec")
"""Policies that only differ in what they select: by default they run in the mixed batch alone."""
KINDS = ((0.7, False), (1.4, False), (1.0, True))  # temperature, and whether the request has a seed of its own
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def quest_selects_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model of three layers Quest's dense ones would leave too little to choose."""
    monkeypatch.setattr(quest, "_DENSE_LAYERS", 0)


@cache
def model() -> LoadedModel:
    return load_model(LoadConfig(model=str(PATH), skip_tokenizer_init=True, device="cpu"))


@cache
def next_logits() -> tuple[Tensor, Tensor, Tensor]:
    """Hugging Face's logits after the prompt and after each one and two tokens more: [1, V], [V, V], [V², V]."""
    hf = Reference.directory(PATH).model
    two = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    with torch.inference_mode():
        return tuple(hf(torch.cat((torch.tensor(PROMPT).expand(len(tail), -1), tail), 1), use_cache=False).logits[:, -1]  # type: ignore[return-value]
                     for tail in (torch.zeros(1, 0, dtype=torch.int64), two[:V, 1:], two))


def joint(temperature: float, top_k: int = V, min_p: float = 0.0) -> Tensor:
    """Probabilities [V³] of three tokens."""
    def probs(logits: Tensor) -> Tensor:
        x = logits.double() / temperature
        keep = (x >= x.topk(top_k).values[:, -1:]) & (x.softmax(-1) >= min_p * x.softmax(-1).amax(-1, keepdim=True))
        return x.masked_fill(~keep, -torch.inf).softmax(-1)

    first, second, third = (probs(x) for x in next_logits())
    return (first.view(V, 1, 1) * second.view(V, V, 1) * third.view(V, V, V)).flatten()


def sample(name: str, draws: int, seed: int = 0, kinds: tuple[tuple[float, bool], ...] = KINDS, known: int = 8) -> list[float]:
    """p-values, by kind, of the joint of three tokens; all kinds share the batches. known: vocabulary of a draft head."""
    config = configure(name, K, tiny_eagle3(PATH, 2, draft_vocab_size=known), min_budget=36 if "snapkv" in name else 2)
    llm = LLM(model(), max_num_seqs=256, kv_cache_tokens=256 * 64, max_num_batched_tokens=16384, seed=seed,
              speculative_config=config)
    params = [SamplingParams(temperature=t, n=draws, max_tokens=K + 2, seed=10**6 * (i + 10 * seed) if seeded else None)
              for i, (t, seeded) in enumerate(kinds)]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    stats = llm.stats()
    assert stats["num_draft_tokens"] > 100
    assert 0.02 < stats["num_accepted_tokens"] / stats["num_draft_tokens"] < 0.99
    place = torch.tensor([V * V, V, 1])
    return [chi_square(torch.tensor([c.token_ids[:3] for c in o.outputs]) @ place, joint(t))
            for o, (t, _) in zip(outputs, kinds, strict=True)]


def test_every_policy_in_one_batch() -> None:
    """Each request has a policy, a temperature and, some of them, a truncation of its own."""
    llm = LLM(model(), max_num_seqs=256, kv_cache_tokens=256 * 64, max_num_batched_tokens=16384,
              speculative_config=configure("hierarchy-eagle3", K, tiny_eagle3(PATH, 2), min_budget=2))
    names, changes = sorted(POLICIES), ({"temperature": 0.7}, {"temperature": 1.0, "top_k": 6}, {"temperature": 1.4, "min_p": 0.05})
    params = [SamplingParams(n=200, max_tokens=K + 2, **changes[i % 3], speculative_config={
        **per_request(name, 2 + i % 3), "min_budget": 36 if "snapkv" in name else 2}) for i, name in enumerate(names)]
    place = torch.tensor([V * V, V, 1])
    for i, out in enumerate(llm.generate([PROMPT] * len(names), params, use_tqdm=False)):
        drawn = torch.tensor([c.token_ids[:3] for c in out.outputs]) @ place
        assert chi_square(drawn, joint(**changes[i % 3])) >= SOUND, names[i]  # type: ignore[arg-type]


# -- what verification is told -----------------------------------------------------------------------------------------


FOLLOWERS = torch.tensor([sorted(range(V), key=lambda t: (a, t) not in set(pairwise(PROMPT))) for a in range(V)])


class Watch:
    """Collects, of every draft that reaches verification, where it lies in the distribution that it is said to come from.

    At verification a round is complete, so that no draft is looked at because of what it is. The distributions list first
    what followed the last token in the prompt: what n-grams propose, and a level that prefers it is seen soonest there.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[Tensor] = []
        self._random = torch.Generator().manual_seed(0)
        verify = Decider.verify

        def watched(decider: Decider, logits: Tensor, rows: Any, tokens: Tensor, slots: np.ndarray, drafted: np.ndarray,
                    first: np.ndarray, place: np.ndarray) -> Any:
            if decider._draft_probs is not None:
                known = decider.rejects[slots]  # the others' drafts are not drawn against a distribution
                for slot, count, start in zip(slots[known].tolist(), drafted[known].tolist(), place[known].tolist(), strict=True):
                    order = FOLLOWERS[tokens[slot, start - 1:start + count - 1]]
                    drafts = order.argsort(1).gather(1, tokens[slot, start:start + count, None])[:, 0]
                    q = decider._draft_probs[slot, :count].double().gather(1, order)
                    own = q.gather(1, drafts[:, None])[:, 0]
                    before = q.cumsum(1).gather(1, drafts[:, None])[:, 0] - own
                    self.found.append(before + torch.rand(count, generator=self._random, dtype=torch.float64) * own)
            return verify(decider, logits, rows, tokens, slots, drafted, first, place)

        monkeypatch.setattr(Decider, "verify", watched)

    def p_value(self) -> float:
        """Of uniformity, in 20 cells."""
        x = torch.cat(self.found)
        assert len(x) > 1000
        return chi_square((x * 20).long().clamp(0, 19), torch.full((20,), 0.05))


@pytest.mark.parametrize("name", [n for n in POLICIES if n not in VARIANTS])
def test_joint_of_three_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output follows the target, and drafts the distributions that verification knows them by."""
    watch = Watch(monkeypatch)
    assert min(sample(name, 250)) >= SOUND
    assert watch.p_value() >= SOUND


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", POLICIES)
def test_joint_with_more_draws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        with monkeypatch.context() as inside:
            watch = Watch(inside)
            assert min(sample(name, 8000, seed)) >= SOUND
            assert watch.p_value() >= SOUND


sound_rejection, sound_check = decide.rejection, Decider._check


def no_residual(drafts: Tensor, count: Tensor, p: Tensor, q: Tensor | None, accept: Tensor, *u: Tensor) -> VerifyResult:
    """Draws from the checking pass itself where a proposal was rejected, as TriForce's public code does."""
    result = sound_rejection(drafts, count, p, q, accept, *u)
    row = torch.arange(len(drafts))
    result.tokens[row, result.num_accepted] = inverse_cdf(p[row, result.num_accepted], u[-1])
    return result


def accept_always(drafts: Tensor, count: Tensor, p: Tensor, q: Tensor | None, accept: Tensor, *u: Tensor) -> VerifyResult:
    return sound_rejection(drafts, count, p, q, torch.full_like(accept, 1e-300), *u)


def break_the_middle(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., VerifyResult]) -> None:
    """Use `broken` where the sparse pass checks proposals, and there alone."""
    def check(self: Decider, *args: Any) -> Tensor:
        with monkeypatch.context() as inside:
            inside.setattr(decide, "rejection", broken)
            return sound_check(self, *args)

    monkeypatch.setattr(Decider, "_check", check)


@pytest.mark.parametrize(("name", "broken", "draws"), [
    ("triforce", no_residual, 2600), ("hierarchy", accept_always, 500),
    pytest.param("hierarchy-eagle3", no_residual, 2600, marks=pytest.mark.slow)])
def test_a_broken_middle_level_is_seen(name: str, broken: Callable[..., VerifyResult], draws: int,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts are not from the distributions that are kept of them, and the output is no longer the target's."""
    break_the_middle(monkeypatch, broken)
    watch = Watch(monkeypatch)
    p = min(sample(name, draws, kinds=((0.7, False),), known=4))
    assert watch.p_value() < BROKEN
    assert p < BROKEN
