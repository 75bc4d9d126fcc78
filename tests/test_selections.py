"""What each policy selects, against direct computations from attention probabilities and keys; suffix automaton, budgets."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsespec.attention.base import SparseRows
from sparsespec.config.model import ModelConfig
from sparsespec.config.speculative import SpeculativeConfig
from sparsespec.kv.pool import KVPool
from sparsespec.spec.base import DraftPolicy, Selection, Verified
from sparsespec.spec.budget import top_entries
from sparsespec.spec.ngram import SuffixAutomaton
from sparsespec.spec.quest import Quest
from sparsespec.spec.registry import make_policy

LAYERS, HEADS, GROUP, DIM = 3, 2, 3, 8
MODEL = ModelConfig("llama", 50, 48, 48, LAYERS, HEADS * GROUP, HEADS, DIM, max_position_embeddings=4000)


def policy(method: str, **values: Any) -> DraftPolicy:
    return make_policy(SpeculativeConfig.from_dict({"method": method, **values}), MODEL)


def softmax_rows(rows: int, length: int, seed: int = 0) -> Tensor:
    """Attention probabilities [layers, KV heads, group, rows, length] of a block's last rows."""
    x = 3 * torch.randn(LAYERS, HEADS, GROUP, rows, length, generator=torch.Generator().manual_seed(seed))
    hidden = torch.ones(rows, length).triu(length - rows + 1).bool()
    return x.masked_fill(hidden, -torch.inf).softmax(-1)


def no_keys(start: int, end: int) -> Tensor:
    raise AssertionError("the policy reads no keys")


def selected(p: DraftPolicy, probs: Tensor, *, accepted: int | None = None, prompt: bool = False) -> Selection:
    """What the policy makes of a full pass whose last rows have these probabilities."""
    rows, length = probs.shape[-2:]
    scored = p.score_rows(rows, prompt)
    scores = None
    if p.wants_scores(prompt):
        scores = torch.empty(LAYERS, HEADS, p.kept_rows(scored), length - scored)
        for layer in range(LAYERS):
            p.observe(probs[layer, :, :, rows - scored:], scores[layer])
    done = rows if accepted is None else accepted
    return p.select(Verified(0, prompt, length - scored, length - rows + done + 1, scored, done, scores, no_keys))


def as_sets(selection: Selection) -> list[list[set[int]]]:
    """The chosen positions of each layer and KV head."""
    width = selection.positions.shape[-1]
    counts = torch.full((LAYERS, HEADS), width) if selection.counts is None else selection.counts
    return [[set(selection.positions[i, h, :int(counts[i, h])].tolist()) for h in range(HEADS)] for i in range(LAYERS)]


def best(scores: Tensor, count: int) -> list[list[set[int]]]:
    """The `count` best positions of scores [layers, KV heads, n], by sorting."""
    return [[set(sorted(range(scores.shape[-1]), key=lambda t: -float(scores[i, h, t]))[:count]) for h in range(HEADS)]
            for i in range(LAYERS)]


@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("rows", ["all", "accepted", "ends"])
def test_pillar(rows: str, group: str) -> None:
    p = policy("pillar", score_rows=rows, score_group=group, score_spread=0, min_budget=7, sparse_attn_ratio=0.1)
    probs = softmax_rows(9, 100)
    by_row = probs[..., :91].mean(2) if group == "mean" else probs[..., :91].amax(2)
    wanted = {"all": by_row.mean(2), "accepted": by_row[:, :, :3].mean(2), "ends": by_row[:, :, [0, 8]].mean(2)}[rows]
    assert as_sets(selected(p, probs, accepted=3)) == best(wanted, math.ceil(0.1 * (91 + 3 + 1)))


def test_pillar_after_the_prompt_scores_as_many_rows_as_a_verification() -> None:
    p, probs = policy("pillar", num_speculative_tokens=4, score_spread=0, min_budget=7), softmax_rows(30, 60)
    assert p.score_rows(30, True) == 5
    assert as_sets(selected(p, probs, prompt=True)) == best(probs[..., -5:, :55].mean((2, 3)), 7)


def test_pillar_scores_spread_to_the_right() -> None:
    """An entry has the best score of itself and of the few before it; ties at the budget's edge may go either way."""
    p, probs = policy("pillar", score_spread=3, min_budget=7), softmax_rows(9, 100)
    mean = probs[..., :91].mean((2, 3))
    spread = torch.stack([mean[..., max(0, t - 3):t + 1].amax(-1) for t in range(91)], -1)
    chosen = selected(p, probs).positions
    assert chosen.shape[-1] == 7
    torch.testing.assert_close(spread.gather(-1, chosen).sort(-1).values, spread.topk(7).values.flip(-1))


def test_shared_budget_goes_to_the_best_of_all_layers_and_heads() -> None:
    scores = torch.rand(LAYERS, HEADS, 50, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 0.6])[:, None]
    chosen = top_entries(scores, 7, shared=True)
    assert chosen.counts is not None
    assert int(chosen.counts.sum()) == 7 * LAYERS * HEADS
    least = scores.flatten().topk(7 * LAYERS * HEADS).values[-1]
    assert as_sets(chosen) == [[{t for t in range(50) if scores[i, h, t] >= least} for h in range(HEADS)] for i in range(LAYERS)]


def test_specattn() -> None:
    p, probs = policy("specattn", min_budget=7, sparse_attn_ratio=0.05), softmax_rows(9, 100)
    mean = probs[:, :, :, [0, 8], :91].mean((1, 2, 3))
    assert as_sets(selected(p, probs)) == best(mean[:, None].expand(-1, HEADS, -1), 7)
    assert as_sets(selected(p, probs, prompt=True)) == best(probs[..., -1, :99].mean((1, 2))[:, None].expand(-1, HEADS, -1), 7)


def test_specattn_budget_is_clamped() -> None:
    p = policy("specattn")
    assert [p.budget(n) for n in (10, 3657, 3658, 4000, 9000)] == [256, 256, 257, 280, 280]
    assert policy("specattn", min_budget=500).budget(4000) == 500


@pytest.mark.parametrize(("method", "sinks"), [("window", 4), ("magicdec", 32)])
def test_windows(method: str, sinks: int) -> None:
    p = policy(method, min_budget=40)
    for tail, length in ((10, 12), (39, 40), (40, 41), (41, 42), (500, 505), (3000, 3009)):
        budget = max(40, math.ceil(0.05 * length))
        wanted = set(range(min(sinks, tail))) | set(range(max(0, tail - (budget - sinks)), tail))
        chosen = p.select(Verified(0, False, tail, length, 9, 9, None, no_keys))
        assert as_sets(chosen) == [[wanted] * HEADS] * LAYERS
        assert chosen.positions.shape[-1] == len(wanted)


def test_snapkv() -> None:
    """The last 32 queries vote at the prompt's end; votes are shared by 7 neighbours; later only the window moves."""
    p, probs = policy("magicdec", magicdec_variant="snapkv", min_budget=60), softmax_rows(50, 200)
    votes = probs[..., -32:, :168].mean((2, 3))
    pooled = torch.stack([votes[..., max(0, t - 3):t + 4].mean(-1) for t in range(168)], -1)
    first = selected(p, probs, prompt=True)
    assert as_sets(first) == best(pooled, 60 - 32)
    assert first.tail == 168
    later = p.select(Verified(0, False, 230, 239, 9, 9, None, no_keys))
    assert as_sets(later) == as_sets(first)
    assert later.tail == 230 - 32
    assert not p.wants_scores(False)


# -- policies that choose at each draft step -----------------------------------------------------------------------------


def draft_rows(p: DraftPolicy, chosen: Selection, pool: KVPool, tail: int, last: int) -> SparseRows:
    """One draft row of slot 0 at position `last`, whose pages lie in order."""
    width = chosen.positions.shape[-1]
    counts = torch.full((1, LAYERS, HEADS), width) if chosen.counts is None else chosen.counts[None]
    table = torch.arange(pool.entries, dtype=torch.int32)[None]
    start = tail if chosen.tail is None else chosen.tail
    return SparseRows(slice(0, 1), torch.tensor([0]), torch.tensor([last]), torch.tensor([start]), chosen.positions[None].int(),
                      counts.int(), table, 1, width, last - start + 1, pool, p.reselect)


def seen(p: DraftPolicy, layer: int, q: Tensor, rows: SparseRows) -> list[list[int]]:
    """Positions that the row sees, by KV head, sorted, as often as they are seen."""
    entries, valid = rows.resolve(layer, q)
    return [sorted(entries[0, h][valid[0, h]].tolist()) for h in range(HEADS)]


def filled_pool(length: int, seed: int) -> KVPool:
    pool = KVPool(MODEL, length, torch.float32, torch.device("cpu"))
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def test_oracle() -> None:
    p, pool, q = policy("oracle", min_budget=9), filled_pool(100, 0), torch.randn(1, HEADS, GROUP, DIM)
    tail, last = 80, 85
    chosen = p.select(Verified(0, False, tail, 82, 9, 2, None, no_keys))
    rows = draft_rows(p, chosen, pool, tail, last)
    for layer in range(LAYERS):
        probs = torch.einsum("hgd,hld->hgl", q[0], pool.k(layer)[:, :last + 1]).softmax(-1).mean(1)[:, :tail]
        assert seen(p, layer, q, rows) == [sorted([*probs[h].topk(9).indices.tolist(), *range(80, 86)]) for h in range(HEADS)]


@pytest.mark.parametrize("verified_before", [None, 33, 70])
def test_quest(verified_before: int | None) -> None:
    """Page bounds grow as pages fill, and whole pages are taken; the first two layers see all, and nothing twice."""
    p, pool, q = policy("quest", min_budget=33), filled_pool(100, 1), torch.randn(1, HEADS, GROUP, DIM)
    assert isinstance(p, Quest)
    keys = pool.data[:, 0]
    if verified_before is not None:
        p.select(Verified(0, True, verified_before, verified_before + 1, 1, 1, None, lambda a, b: keys[:, :, a:b]))
    tail, last = 90, 97
    chosen = p.select(Verified(0, verified_before is None, tail, 92, 9, 2, None, lambda a, b: keys[:, :, a:b]))
    rows = draft_rows(p, chosen, pool, tail, last)
    for layer in range(LAYERS):
        found = seen(p, layer, q, rows)
        if layer < 2:
            assert found == [list(range(98))] * HEADS
            continue
        for h in range(HEADS):
            pages = pool.k(layer)[h, :80].view(5, 16, DIM)
            low, high = pages.amin(1), pages.amax(1)
            score = torch.stack([torch.maximum(q[0, h, g] * low, q[0, h, g] * high).sum(-1) for g in range(GROUP)]).mean(0)
            wanted = [16 * page + i for page in score.topk(3).indices.tolist() for i in range(16)]
            assert found[h] == sorted([*wanted, *range(80, 98)])


# -- budgets by attention mass --------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 40), st.floats(0.05, 1.0), st.floats(0.0, 0.6))
def test_mass_budgets(seed: int, n: int, most: int, mass: float, in_tail: float) -> None:
    """The fewest best entries whose probability, with the tail's, reaches `mass`; at least one and at most `most`."""
    generator = torch.Generator().manual_seed(seed)
    scores = (3 * torch.randn(LAYERS, HEADS, n, generator=generator, dtype=torch.float64)).softmax(-1) * (1 - in_tail)
    chosen = top_entries(scores, most, mass)
    assert chosen.counts is not None
    for i, h in np.ndindex(LAYERS, HEADS):
        ranked = sorted(((float(x), t) for t, x in enumerate(scores[i, h])), reverse=True)
        count = next((c for c in range(1, n + 1) if in_tail + sum(x for x, _ in ranked[:c]) >= mass + 1e-9), n)
        least = next((c for c in range(1, n + 1) if in_tail + sum(x for x, _ in ranked[:c]) >= mass - 1e-9), n)
        found = int(chosen.counts[i, h])
        assert min(least, most, n) <= found <= min(count, most, n)
        assert set(chosen.positions[i, h, :found].tolist()) == {t for _, t in ranked[:found]}


def test_without_mass_every_head_gets_the_budget() -> None:
    scores = torch.rand(LAYERS, HEADS, 20)
    assert as_sets(top_entries(scores, 6)) == best(scores, 6)
    assert top_entries(scores, 50).positions.shape[-1] == 20
    assert top_entries(scores[..., :0], 5, 0.9).positions.shape == (LAYERS, HEADS, 0)


# -- the suffix automaton ---------------------------------------------------------------------------------------------------


def longest_match(text: list[int], after: list[int]) -> tuple[int, list[int]]:
    """(length of the longest suffix of text + after that stands in text, before that suffix itself; where its places end), by
    looking everywhere. Places that something follows are preferred."""
    whole = text + after
    for size in range(len(whole), 0, -1):
        ends = [i + size for i in range(len(text) - size + 1)
                if text[i:i + size] == whole[len(whole) - size:] and i + size < len(whole)]
        if ends:
            return size, [e for e in ends if e < len(text)] or ends
    return 0, []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=6), st.integers(1, 3), st.integers(3, 7),
       st.integers(1, 5))
def test_suffix_automaton(text: list[int], after: list[int], shortest: int, longest: int, count: int) -> None:
    """What it proposes followed an earlier place of the longest suffix; it proposes nothing only if there is none."""
    automaton = SuffixAutomaton()
    half = len(text) // 2
    automaton.extend(text[:half])
    automaton.follow([], shortest, longest, count)
    automaton.extend(text[half:])
    automaton.follow([], shortest, longest, count)
    assert automaton.text == text
    size, ends = longest_match(text, after)
    found = automaton.follow(after, shortest, longest, count)
    if min(size, longest) < shortest:
        assert found == []
    else:
        assert found in [text[e:e + count] for e in ends]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_automaton_stays_small_and_knows_the_latest_place(text: list[int]) -> None:
    """Asking twice gives the same; asked again after the same words, it gives what followed them last."""
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert len(automaton._next) <= 2 * len(text)
    assert sum(map(len, automaton._next)) <= 3 * len(text)
    assert automaton.follow([], 1, 7, 3) == automaton.follow([], 1, 7, 3)


def test_recent_text_is_preferred() -> None:
    automaton = SuffixAutomaton()
    for after, expected in ((1, []), (2, [1]), (3, [2])):
        automaton.extend([9, 8])
        assert automaton.follow([], 2, 7, 1) == expected
        automaton.extend([after])


def test_memory_of_ngram_is_per_slot() -> None:
    p = policy("ngram")
    tokens = torch.tensor([[1, 2, 3, 1, 2, 0, 0], [4, 4, 4, 4, 0, 0, 0]])
    requests = [SimpleNamespace(prompt_token_ids=row[:n].tolist(), output_token_ids=[])
                for row, n in zip(tokens, (5, 4), strict=True)]
    context = SimpleNamespace(requests=requests, slots=np.array([0, 1]), most=np.array([2, 3]), buffered=lambda i: [])
    assert p.propose(context) == [[3, 1], [4]]  # type: ignore[arg-type]
    p.leave(0)
    assert p.state.keys() == {1}
