"""Distributions against Hugging Face's warpers, and draws against the distributions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sparsespec.core.sampling_params import SamplingParams
from sparsespec.sampling import rng, truncate
from sparsespec.sampling.sampler import Rows, Sampler, draw, draw_coupled
from sparsespec.sampling.table import SamplingTable
from stat_utils import BROKEN, SOUND, chi_square

V = 50
NEG = float("-inf")
TOKENS = torch.zeros(64, 4, dtype=torch.int64)


def sampler(settings_: list[dict[str, Any]], vocab: int = V) -> Sampler:
    """Slot i gets settings_[i]; `coupled` and `slot_seed` are for the table."""
    table = SamplingTable(len(settings_), vocab, "cpu")
    for slot, kw in enumerate(settings_):
        kw = dict(kw)
        coupled, seed = kw.pop("coupled", False), kw.pop("slot_seed", slot)
        table.set(slot, SamplingParams(**kw), prompt_len=0, seed=seed, coupled=coupled, eos_token_ids=(), bad_word_ids=[])
    return Sampler(table)


def rows_of(slots: list[int], position: int = 2) -> Rows:
    return Rows(torch.tensor(slots), torch.full((len(slots),), position))


def reference(logits: torch.Tensor, kw: dict[str, Any]) -> torch.Tensor:
    x = logits[None] / kw.get("temperature", 1.0)
    none = torch.zeros(1, 0, dtype=torch.int64)
    if kw.get("min_p", 0) > 0:
        x = MinPLogitsWarper(kw["min_p"])(none, x)
    if kw.get("top_k", 0) > 0:
        x = TopKLogitsWarper(kw["top_k"])(none, x)
    if kw.get("top_p", 1) < 1:
        x = TopPLogitsWarper(kw["top_p"])(none, x)
    return x.softmax(-1)[0]


PARAMS = st.fixed_dictionaries({
    "temperature": st.floats(0.2, 2.0), "top_k": st.one_of(st.just(0), st.integers(1, 60)),
    "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.999)), "min_p": st.one_of(st.just(0.0), st.floats(0.001, 1.0))})


@given(st.lists(PARAMS, min_size=1, max_size=5), st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_truncation_equals_hugging_face(params: list[dict[str, Any]], seed: int) -> None:
    s = sampler(params)
    logits = torch.randn(len(params), V, generator=torch.Generator().manual_seed(seed)) * 3
    dist = s.distribution(logits, rows_of(list(range(len(params)))), TOKENS)
    assert dist.probs is not None
    assert dist.index.tolist() == list(range(len(params)))
    for row, kw in enumerate(params):
        want = reference(logits[row], kw)
        got = dist.probs[row]
        differ = (want > 0) != (got > 0)  # a cut within rounding of a boundary may fall on either side
        assert differ.sum() <= 1
        if not differ.any():
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_top_p_beyond_the_first_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that need few, many and all tokens give what one full sort gives."""
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[8.0], [3.0], [0.5], [0.0]])
    s = sampler([{"top_p": 0.9}, {"top_p": 0.99}, {"top_p": 0.9}, {"top_p": 0.5}], 3000)
    tiered = s.distribution(logits, rows_of([0, 1, 2, 3]), TOKENS).probs
    monkeypatch.setattr(truncate, "_CANDIDATES", ())
    full = s.distribution(logits, rows_of([0, 1, 2, 3]), TOKENS).probs
    assert tiered is not None
    assert torch.equal(tiered, full)  # type: ignore[arg-type]
    for row, p in enumerate((0.9, 0.99, 0.9)):
        torch.testing.assert_close(tiered[row], reference(logits[row], {"top_p": p}), rtol=1e-4, atol=1e-7)
    assert (tiered[3] > 0).all()  # all tied: nothing tells which to cut


def test_a_row_does_not_depend_on_its_batch() -> None:
    params = [{"temperature": 0.7, "coupled": True}, {"temperature": 1.2, "top_p": 0.9}, {"temperature": 0}, {"top_k": 5},
              {"min_p": 0.1, "top_k": 9, "top_p": 0.8, "coupled": True}]
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(3)) * 2
    together = sampler(params)
    dist = together.distribution(logits, rows_of([0, 1, 2, 3, 4]), TOKENS)
    nonce = torch.arange(5)
    drafts = together.sample_draft(dist, rows_of([0, 1, 2, 3, 4]), nonce)
    for i, kw in enumerate(params):
        alone = sampler([{**kw, "slot_seed": i}])
        one = alone.distribution(logits[i:i + 1], rows_of([0]), TOKENS)
        if one.probs is not None and dist.probs is not None:
            assert torch.equal(one.probs[0], dist.probs[dist.index[i]])
        assert alone.sample_draft(one, rows_of([0]), nonce[i:i + 1])[0] == drafts[i]


def test_greedy_rows_have_no_probabilities_and_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, V)
    logits[:, [31, 7, 11]] = 5.0
    for s in (sampler([{"temperature": 0, "top_k": 3}]), sampler([{"temperature": 0}, {}])):
        dist = s.distribution(logits, rows_of([0, 0]), TOKENS)
        assert dist.argmax.tolist() == [7, 7]
        assert dist.probs is None
        assert dist.index.tolist() == [-1, -1]
        assert s.sample_target_tokens(dist, rows_of([0, 0])).tolist() == [7, 7]


def test_mixed_temperatures_in_one_batch() -> None:
    temperatures = (0, 0.3, 0.7, 1.0, 1.5)
    n, vocab = 20_000, 16
    s = sampler([{"temperature": t, "slot_seed": 100 + i} for i, t in enumerate(temperatures)], vocab)
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    slots = torch.arange(5).repeat_interleave(n)
    rows = Rows(slots, torch.arange(n).repeat(5))
    dist = s.distribution(logits[slots], rows, TOKENS)
    drawn = s.sample_draft(dist, rows, rows.positions).view(5, n)
    assert (drawn[0] == logits[0].argmax()).all()
    for i, t in enumerate(temperatures[1:], 1):
        assert chi_square(drawn[i], (logits[i] / t).softmax(-1)) > SOUND
        assert chi_square(drawn[i], (logits[i] / (t * 1.1)).softmax(-1)) < BROKEN


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_coupled_draws_follow_the_distribution(seed: int) -> None:
    n, vocab = 40_000, 16
    p = (torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 1.5).softmax(-1)
    p[3] = 0
    p = p / p.sum()
    seeds = torch.full((n,), seed)
    drawn = draw_coupled(p.expand(n, -1), seeds, torch.arange(n))
    assert chi_square(drawn, p) > SOUND
    assert not (drawn == 3).any()
    by_definition = (p.log() + rng.gumbel(seeds, torch.arange(n), vocab, rng.COUPLED)).argmax(-1)
    assert torch.equal(drawn, by_definition)
    assert chi_square(drawn, p.sqrt() / p.sqrt().sum()) < BROKEN


def test_coupled_target_ignores_nonce_and_agrees_with_the_draft() -> None:
    s = sampler([{"coupled": True, "slot_seed": 7}, {"slot_seed": 7}])
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0)).repeat(200, 1)
    rows = Rows(torch.tensor([0, 1]).repeat(100), torch.arange(200))
    dist = s.distribution(logits, rows, TOKENS)
    first, second = (s.sample_draft(dist, rows, torch.full((200,), nonce)) for nonce in (5, 6))
    assert torch.equal(first[::2], second[::2])
    assert torch.equal(first[::2], s.sample_target_tokens(dist, rows)[::2])
    assert not torch.equal(first[1::2], second[1::2])
    assert len(set(first[::2].tolist())) > 10


def test_forbidden_tokens_are_never_drawn() -> None:
    s = sampler([{"coupled": True}, {}])
    logits = torch.full((4000, V), NEG)
    allowed = [1, 17, V - 2]
    logits[:, allowed] = torch.tensor([0.0, -15.0, 0.0])
    rows = Rows(torch.tensor([0, 1]).repeat(2000), torch.arange(4000))
    dist = s.distribution(logits, rows, TOKENS)
    assert set(s.sample_draft(dist, rows, rows.positions).tolist()) <= set(allowed)
    probs = dist.probs
    assert probs is not None
    edge = torch.tensor([5e-324, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(probs[:2], edge).tolist() == [1, V - 2]


def test_a_broken_row_is_flagged_and_leaves_the_others_alone() -> None:
    params = [{}, {"temperature": 0}, {"coupled": True}, {"top_p": 0.5, "top_k": 4, "min_p": 0.01}]
    s = sampler(params)
    clean = torch.randn(8, V, generator=torch.Generator().manual_seed(0))
    rows = rows_of([0, 1, 2, 3, 0, 1, 2, 3])
    want = s.distribution(clean, rows, TOKENS)
    for poison in (float("nan"), float("inf"), NEG):
        logits = clean.clone()
        if poison == NEG:
            logits[4:] = NEG
        else:
            logits[4:, 9] = poison
        got = s.distribution(logits, rows, TOKENS)
        assert got.bad.tolist() == [False] * 4 + [True] * 4
        assert got.probs is not None
        assert want.probs is not None
        assert torch.equal(got.argmax[:4], want.argmax[:4])
        assert torch.equal(got.probs[:3], want.probs[:3])
        assert torch.isfinite(got.probs).all()
        tokens = s.sample_draft(got, rows, rows.positions)
        assert torch.equal(tokens[:4], s.sample_draft(want, rows, rows.positions)[:4])
        assert ((tokens >= 0) & (tokens < V)).all()


def test_tiny_temperature_and_huge_logits_stay_finite() -> None:
    s = sampler([{"temperature": 1.1e-5}, {"temperature": 5.0, "top_p": 0.3}])
    logits = torch.zeros(2, V)
    logits[:, 4] = 1e4
    dist = s.distribution(logits, rows_of([0, 1]), TOKENS)
    assert dist.probs is not None
    assert dist.probs[:, 4].tolist() == [1, 1]
