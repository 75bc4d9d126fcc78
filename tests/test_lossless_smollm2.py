"""Case T1: on SmolLM2, greedy output equals Hugging Face's in every cell. The default run covers each setting and pairs of them."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from driving import serve, speculate, token_ids
from reference import PROMPTS, Reference
from sparsespec import LLM, SamplingParams
from sparsespec.loader.loaded import LoadedModel

Cell = tuple[int, float, int, str, int]
Cases = list[tuple[list[int], list[int]]]
STAGGERED = [0, 0, 1, 2, 5, 9, 9, 14, 20, 27, 35, 36, 44, 50, 61, 62, 63, 70, 80, 90]


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, smol: LoadedModel, smol_reference: Reference) -> Cases:
    """20 screened prompts and Hugging Face's greedy ids, 256 each under --run-slow and 64 otherwise."""
    tokens = 256 if request.config.getoption("--run-slow") else 64
    llm = LLM(smol, kv_cache_tokens=30 * (tokens + 48), max_model_len=512, max_num_seqs=30, speculative_config=speculate(0))
    found = smol_reference.screen(llm, list(PROMPTS), tokens, 20)
    assert smol_reference.checked >= 20 * tokens
    return found


def run_cell(loaded: LoadedModel, cases: Cases, tokens: int, k: int, ratio: float, page: int, schedule: str, batch: int) -> None:
    """Serve all cases, `batch` at once; asserts their ids, and that drafts were tried, taken and turned down."""
    config = speculate(k, ratio, schedule=schedule, min_budget=16)
    llm = LLM(loaded, kv_cache_tokens=batch * 512, max_model_len=400, max_num_seqs=batch, page_size=page, speculative_config=config)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs = serve(llm, [p for p, _ in cases], params, STAGGERED[:len(cases)])
    assert token_ids(outputs) == [ids[:tokens] for _, ids in cases]
    stats = llm.stats()
    if k == 0:
        assert stats["num_draft_tokens"] == 0
    elif ratio == 1.0:
        assert 0 < stats["num_accepted_tokens"] == stats["num_draft_tokens"]
    else:
        assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]


@pytest.mark.parametrize(("k", "ratio", "page", "schedule", "batch"), [
    (0, 1.0, 1, "unified", 8), (8, 0.05, 16, "unified", 8), (4, 0.3, 1, "lockstep", 8), (16, 1.0, 16, "lockstep", 8),
    (1, 0.05, 1, "unified", 20), (8, 0.3, 16, "lockstep", 20)])
def test_t01_greedy_text_is_the_models_own(k: int, ratio: float, page: int, schedule: str, batch: int, smol: LoadedModel,
                                           cases: Cases) -> None:
    run_cell(smol, cases, 64, k, ratio, page, schedule, batch)


@pytest.mark.parametrize(("k", "ratio", "page", "schedule", "batch", "count"), [
    (4, 0.05, 16, "lockstep", 1, 2), (16, 0.05, 1, "unified", 3, 4), (0, 1.0, 16, "unified", 1, 1)])
def test_t01_small_batches(k: int, ratio: float, page: int, schedule: str, batch: int, count: int, smol: LoadedModel,
                           cases: Cases) -> None:
    run_cell(smol, cases[:count], 64, k, ratio, page, schedule, batch)


FULL: list[Cell] = [(0, 1.0, page, "unified", batch) for page, batch in product((1, 16), (1, 3, 8))]
FULL += product((1, 4, 8, 16), (0.05, 0.3, 1.0), (1, 16), ("unified", "lockstep"), (1, 3, 8))


def covering(cells: list[Cell]) -> list[Cell]:
    """Few of the cells in which every three settings that occur together in any cell do so too (a covering array of strength 3)."""
    def triples(cell: Cell) -> set[object]:
        return {(places, tuple(cell[p] for p in places)) for places in combinations(range(len(cell)), 3)}

    left: set[object] = set().union(*map(triples, cells))
    chosen = []
    while left:
        chosen.append(max(cells, key=lambda cell: len(triples(cell) & left)))
        left -= triples(chosen[-1])
    return chosen


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("k", "ratio", "page", "schedule", "batch"), covering(FULL))
def test_t01_every_three_settings_together(k: int, ratio: float, page: int, schedule: str, batch: int, smol: LoadedModel,
                                           cases: Cases) -> None:
    """20 prompts of 256 tokens each."""
    run_cell(smol, cases, 256, k, ratio, page, schedule, batch)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("k", "ratio", "page", "schedule", "batch"), FULL)
def test_t01_every_cell(k: int, ratio: float, page: int, schedule: str, batch: int, smol: LoadedModel, cases: Cases) -> None:
    """20 prompts of 256 tokens each in all cells: hours on a CPU."""
    run_cell(smol, cases, 256, k, ratio, page, schedule, batch)
