"""Logits processors against slow references, the table's bookkeeping, and validation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from sparsespec.core.errors import InvalidValueError
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.sampling.processors import Rows, process_logits
from sparsespec.sampling.table import Feature, SamplingTable, validate

V, SLOTS, LENGTH = 24, 6, 20
NEG = float("-inf")


def seat(table: SamplingTable, slot: int, *, prompt_len: int = 4, seed: int = 0, coupled: bool = False,
         eos: tuple[int, ...] = (), bad: list[list[int]] | None = None, **params: Any) -> SamplingParams:
    p = SamplingParams(**params)
    table.set(slot, p, prompt_len=prompt_len, seed=seed, coupled=coupled, eos_token_ids=eos, bad_word_ids=bad or [])
    return p


def some_rows(seed: int, n: int = 9) -> tuple[torch.Tensor, Rows, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, V, generator=g) * 4
    rows = Rows(torch.randint(0, SLOTS, (n,), generator=g), torch.randint(4, LENGTH + 1, (n,), generator=g))
    return logits, rows, torch.randint(0, V, (SLOTS, LENGTH), generator=g)


def reference(logits: torch.Tensor, rows: Rows, tokens: torch.Tensor, slots: dict[int, dict[str, Any]]) -> torch.Tensor:
    """One row, one token at a time. slots: keyword arguments of seat."""
    out = logits.clone()
    for i, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        s = slots.get(slot, {})
        prompt_len = s.get("prompt_len", 4)
        history = tokens[slot, :position].tolist()
        row = out[i]
        if s.get("allowed_token_ids"):
            for t in range(V):
                if t not in s["allowed_token_ids"]:
                    row[t] = NEG
        for word in s.get("bad") or []:
            if len(history) >= len(word) - 1 and history[len(history) - len(word) + 1:] == word[:-1]:
                row[word[-1]] = NEG
        if position - prompt_len < s.get("min_tokens", 0):
            for t in {*s.get("eos", ()), *s.get("stop_token_ids", ())}:
                row[t] = NEG
        for t, bias in (s.get("logit_bias") or {}).items():
            row[t] += bias
        if s.get("repetition_penalty", 1.0) != 1:
            hf = RepetitionPenaltyLogitsProcessor(s["repetition_penalty"])
            row[:] = hf(torch.tensor([history]), row[None].clone())[0]
        for t, count in Counter(history[prompt_len:]).items():
            row[t] -= s.get("frequency_penalty", 0.0) * count + s.get("presence_penalty", 0.0)
    return out


def check(slots: dict[int, dict[str, Any]], seed: int) -> None:
    table = SamplingTable(SLOTS, V, "cpu")
    for slot, kw in slots.items():
        seat(table, slot, **kw)
    logits, rows, tokens = some_rows(seed)
    before = logits.clone()
    got = process_logits(logits, rows, table, tokens)
    torch.testing.assert_close(got, reference(logits, rows, tokens, slots), rtol=1e-6, atol=1e-5)
    assert torch.equal(logits, before)


CASES: dict[str, dict[int, dict[str, Any]]] = {
    "allowed": {0: {"allowed_token_ids": [3, 5, 5]}, 2: {"allowed_token_ids": list(range(10))}},
    "bias": {1: {"logit_bias": {0: -100, 7: 100}}, 2: {"logit_bias": {5: 0.5}}, 3: {}},
    "allowed and bias": {1: {"allowed_token_ids": [1, 2], "logit_bias": {2: 3.0, 9: 100}}},
    "min_tokens": {0: {"min_tokens": 5, "eos": (2,), "stop_token_ids": [7, 9, 11]}, 1: {"min_tokens": 16, "eos": (1,)},
                   2: {"eos": (3,)}},
    "repetition": {0: {"repetition_penalty": 1.7}, 3: {"repetition_penalty": 0.6}, 4: {}},
    "frequency": {0: {"frequency_penalty": 0.7}, 2: {"presence_penalty": -1.1},
                  3: {"frequency_penalty": 2, "presence_penalty": 1}},
    "all": {s: {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logit_bias": {s: 2.0},
                "allowed_token_ids": list(range(2, 20)), "min_tokens": 3 * s, "eos": (2, 4), "bad": [[6]],
                "max_tokens": None} for s in range(4)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_against_the_reference(name: str, seed: int) -> None:
    check(CASES[name], seed)


@given(st.integers(0, 10**6), st.floats(0.2, 3.0), st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 16))
@settings(max_examples=40, deadline=None)
def test_penalties_property(seed: int, repetition: float, frequency: float, presence: float, prompt_len: int) -> None:
    check({s: {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence,
               "prompt_len": prompt_len} for s in (0, 2, 5)}, seed)


@given(st.integers(0, 10**6), st.data())
@settings(max_examples=40, deadline=None)
def test_bad_words_property(seed: int, data: st.DataObject) -> None:
    """Words that are taken from the histories themselves, so that they do match."""
    _, rows, tokens = some_rows(seed)
    slots: dict[int, dict[str, Any]] = {}
    for slot, position in zip(rows.slots.tolist(), rows.positions.tolist(), strict=True):
        n = data.draw(st.integers(0, 4))
        words = slots.setdefault(slot, {"bad": []})["bad"]
        words.append([*tokens[slot, position - n:position].tolist(), data.draw(st.integers(0, V - 1))])
    slots[next(iter(slots))]["bad"].append([1] * 9)
    check(slots, seed)


def test_a_word_longer_than_the_history_is_not_banned() -> None:
    table = SamplingTable(SLOTS, V, "cpu")
    seat(table, 0, bad=[[3, 3, 3, 8], [3, 8]])
    tokens = torch.full((SLOTS, LENGTH), 3)
    rows = Rows(torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 2, 3]))
    banned = process_logits(torch.zeros(4, V), rows, table, tokens)[:, 8]
    assert banned.tolist() == [0, NEG, NEG, NEG]
    table.clear(0)
    seat(table, 0, bad=[[3, 3, 3, 8]])
    assert process_logits(torch.zeros(4, V), rows, table, tokens)[:, 8].tolist() == [0, 0, 0, NEG]


def test_drafts_in_the_history_count() -> None:
    """A verified row must see what a decoded row would."""
    table = SamplingTable(SLOTS, V, "cpu")
    seat(table, 0, prompt_len=2, frequency_penalty=1.0)
    tokens = torch.tensor([[1, 1, 5, 5, 6, 0]]).repeat(SLOTS, 1)
    rows = Rows(torch.zeros(4, dtype=torch.int64), torch.tensor([2, 3, 4, 5]))
    got = process_logits(torch.zeros(4, V), rows, table, tokens)
    assert got[:, 5].tolist() == [0, -1, -2, -2]
    assert got[:, 6].tolist() == [0, 0, 0, -1]
    assert (got[:, 1] == 0).all()


def test_nothing_in_use_costs_no_copy_and_half_is_converted() -> None:
    table = SamplingTable(SLOTS, V, "cpu")
    seat(table, 0)
    logits, rows, tokens = some_rows(0)
    assert process_logits(logits, rows, table, tokens) is logits
    assert process_logits(logits.bfloat16(), rows, table, tokens).dtype == torch.float32


def test_bias_forces_and_forbids() -> None:
    table = SamplingTable(SLOTS, V, "cpu")
    seat(table, 0, logit_bias={4: 100})
    seat(table, 1, logit_bias={int(i): -100 for i in range(V - 1)})
    rows = Rows(torch.tensor([0, 1]), torch.tensor([5, 5]))
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(0)) * 10
    probs = process_logits(logits, rows, table, torch.zeros(SLOTS, LENGTH, dtype=torch.int64)).softmax(-1)
    assert probs[0, 4] > 1 - 1e-6
    assert probs[1, V - 1] > 1 - 1e-6


def test_a_slot_is_replaced_and_cleared() -> None:
    table = SamplingTable(SLOTS, V, "cpu")
    for slot in range(SLOTS):
        seat(table, slot, logit_bias={slot: 1.0}, top_k=slot + 2, top_p=0.5, min_p=0.1, repetition_penalty=2, min_tokens=3,
             presence_penalty=1, eos=(1, 2, 3), bad=[[1]])
    assert table.max_top_k == SLOTS + 1
    seat(table, 5, temperature=0)
    assert table.max_top_k == SLOTS
    assert not table.all_use(Feature.RANDOM)
    for slot in range(SLOTS):
        table.clear(slot)
        table.clear(slot)
    assert not any(table.uses(f) for f in Feature)
    fresh = SamplingTable(SLOTS, V, "cpu")
    for name in ("temperature", "top_p", "min_p", "repetition", "frequency", "presence", "top_k", "seed", "prompt_len",
                 "min_tokens", "static_row"):
        assert torch.equal(getattr(table, name), getattr(fresh, name)), name
    assert (table.stop_ids == -1).all()
    seat(table, 3, logit_bias={1: 2.0})
    assert len(table.static) <= SLOTS
    assert table.static[table.static_row[3]].nonzero().tolist() == [[1]]


def test_seeds_are_kept_whole() -> None:
    table = SamplingTable(SLOTS, V, "cpu")
    for seed in (2**63 - 1, -2**63, 0):
        seat(table, 1, seed=seed)
        assert table.seed[1].item() == seed


@pytest.mark.parametrize(("field", "params"), [
    ("logit_bias", {"logit_bias": {V: 1.0}}), ("allowed_token_ids", {"allowed_token_ids": [0, V + 3]}),
    ("stop_token_ids", {"stop_token_ids": [V]}), ("allowed_token_ids", {"allowed_token_ids": [2, 7], "min_tokens": 1,
                                                                       "stop_token_ids": [7]}),
])
def test_what_the_vocabulary_cannot_hold_is_refused(field: str, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError) as e:
        validate(SamplingParams(**params), V, stop_ids=(2,))
    assert e.value.field == field
    assert e.value.remedy


def test_refusals_leave_the_slot_alone() -> None:
    table = SamplingTable(SLOTS, V, "cpu")
    seat(table, 0, temperature=0.5)
    for kw in ({"bad": [[]]}, {"bad": [[V]]}, {"eos": (V,)}, {"logit_bias": {V: 1}}):
        with pytest.raises(InvalidValueError):
            seat(table, 0, **kw)
    assert table.temperature[0] == 0.5
    assert table.uses(Feature.RANDOM)
