"""Log probabilities: finite, at most 0, ranked, and of the right distribution."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsespec.core.sampling_params import SamplingParams
from sparsespec.sampling.logprobs import FLOOR, gather_logprobs, processed_logprobs, raw_logprobs, to_dicts
from sparsespec.sampling.processors import Rows
from sparsespec.sampling.sampler import Sampler
from sparsespec.sampling.table import SamplingTable

V = 40
TOKENS = torch.zeros(4, 8, dtype=torch.int64)


def _logits(seed: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def _sampler(*params: SamplingParams) -> Sampler:
    table = SamplingTable(len(params), V, "cpu")
    for slot, p in enumerate(params):
        table.set(slot, p, prompt_len=0, seed=slot, coupled=False, eos_token_ids=(), bad_word_ids=[])
    return Sampler(table)


def test_raw_is_the_log_softmax_in_double() -> None:
    logits = _logits(0)
    torch.testing.assert_close(raw_logprobs(logits).double(), logits.double().log_softmax(-1), rtol=0, atol=1e-5)
    assert raw_logprobs(logits.half()).dtype == torch.float32


def test_gaps_infinities_and_nan_stay_finite() -> None:
    logits = torch.zeros(4, V)
    logits[0, 3] = 200.0
    logits[1, 3] = 1e30
    logits[2, 5:] = float("-inf")
    logits[3, 3] = float("nan")
    got = raw_logprobs(logits)
    assert torch.isfinite(got).all()
    assert (got <= 0).all()
    assert got[0, 0].item() == -200
    assert got[1, 0].item() == FLOOR
    assert (got[2, 5:] == FLOOR).all()
    s = _sampler(*[SamplingParams(temperature=0.01, top_p=0.9)] * 4)
    processed = processed_logprobs(logits, Rows(torch.arange(4), torch.full((4,), 2)), s, TOKENS)
    assert torch.isfinite(processed).all()
    assert (processed <= 0).all()
    assert processed[0, 3] == 0


def test_processed_is_renormalised_after_truncation() -> None:
    s = _sampler(SamplingParams(temperature=0.7, top_k=10, top_p=0.8), SamplingParams(temperature=0, logit_bias={4: 3.0}),
                 SamplingParams(temperature=2.0))
    logits = _logits(1)
    rows = Rows(torch.arange(3), torch.full((3,), 2))
    got = processed_logprobs(logits, rows, s, TOKENS)
    dist = s.distribution(logits, rows, TOKENS)
    assert dist.probs is not None
    kept = dist.probs[0] > 0
    assert 1 <= kept.sum() <= 10
    torch.testing.assert_close(got[0, kept], dist.probs[0, kept].log(), rtol=0, atol=1e-5)
    assert (got[0, ~kept] == FLOOR).all()
    biased = logits[1].clone()
    biased[4] += 3
    torch.testing.assert_close(got[1], biased.log_softmax(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(got[2], (logits[2] / 2).log_softmax(-1), rtol=0, atol=1e-5)


@given(st.integers(0, 10**6), st.integers(0, 20), st.booleans())
@settings(max_examples=60, deadline=None)
def test_gather_against_a_sort(seed: int, num_top: int, tied: bool) -> None:
    logits = _logits(seed)
    lp = raw_logprobs(logits.round() if tied else logits)
    ids = torch.randint(0, V, (3,), generator=torch.Generator().manual_seed(seed))
    logprob, rank, top_ids, top = gather_logprobs(lp, ids, num_top)
    assert top_ids.shape == top.shape == (3, num_top)
    for row in range(3):
        order = sorted(range(V), key=lambda t, row=row: (-lp[row, t].item(), t))  # type: ignore[misc]
        assert top_ids[row].tolist() == order[:num_top]
        assert top[row].tolist() == [lp[row, t].item() for t in order[:num_top]]
        assert logprob[row] == lp[row, ids[row]]
        assert rank[row] == 1 + sum(v > logprob[row].item() for v in lp[row].tolist())


def test_dicts_have_the_sampled_token_first() -> None:
    lp = raw_logprobs(torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 3.0, 2.0, 1.0]]))
    ids = torch.tensor([3, 0])
    dicts = to_dicts(ids, *gather_logprobs(lp, ids, 2))
    assert [list(d) for d in dicts] == [[3, 1, 2], [0, 1]]
    assert [d.rank for d in dicts[0].values()] == [3, 1, 1]
    assert dicts[1][0].rank == 1
    assert dicts[1][1].rank == 2
    assert dicts[0][3].logprob == lp[0, 3].item()
    assert [list(d) for d in to_dicts(ids, *gather_logprobs(lp, ids, 0))] == [[3], [0]]


def test_more_top_tokens_than_the_vocabulary() -> None:
    lp = raw_logprobs(torch.zeros(1, 4))
    assert gather_logprobs(lp, torch.tensor([1]), 20)[2].tolist() == [[0, 1, 2, 3]]
