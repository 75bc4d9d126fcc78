"""The counter-based generator: uniformity, independence of neighbouring keys, exact draws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sparsespec.sampling import rng
from stat_utils import SOUND, chi_square

STREAMS = (rng.TARGET, rng.DRAFT, rng.ACCEPT, rng.RESIDUAL, rng.COUPLED)
N = 40_000


def _keys(vary: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """seeds, counters, nonces [N] of which one runs and the others stand."""
    run = torch.arange(N)
    return tuple(run if name == vary else torch.full((N,), 3) for name in ("seed", "counter", "nonce"))  # type: ignore[return-value]


@pytest.mark.parametrize("vary", ["seed", "counter", "nonce"])
@pytest.mark.parametrize("stream", STREAMS)
def test_uniform_along_each_key(vary: str, stream: int) -> None:
    u = rng.uniform(*_keys(vary), stream)
    assert u.dtype == torch.float64
    assert stats.kstest(u.numpy(), "uniform").pvalue > SOUND
    pairs = (u[:-1] * 16).long() * 16 + (u[1:] * 16).long()  # neighbouring keys, jointly
    assert chi_square(pairs[::2], torch.full((256,), 1 / 256)) > SOUND


def test_streams_and_nonces_are_independent() -> None:
    seeds, counters, _ = _keys("counter")
    keys = [(0, s) for s in STREAMS] + [(1, rng.DRAFT), (2, rng.DRAFT)]
    columns = [rng.uniform(seeds, counters, nonce, stream) for nonce, stream in keys]
    correlation = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns))
    assert correlation.abs().max() < 4.5 / N**0.5


def test_a_row_of_noise_is_independent_of_its_neighbours() -> None:
    e = rng.exponential(torch.tensor([5, 5, 6]), torch.tensor([9, 10, 9]), N, rng.COUPLED)
    for row in e:
        assert stats.kstest(row.numpy(), "expon").pvalue > SOUND
    correlation = torch.corrcoef(e.double()) - torch.eye(3)
    assert correlation.abs().max() < 4.5 / N**0.5


def test_gumbel_distribution_and_shape() -> None:
    g = rng.gumbel(torch.tensor([1, 2]), torch.tensor([0, 0]), N, rng.COUPLED)
    assert g.shape == (2, N)
    assert g.dtype == torch.float32
    assert stats.kstest(g[0].numpy(), "gumbel_r").pvalue > SOUND
    assert torch.isfinite(g).all()


@given(seed=st.integers(-2**63, 2**63 - 1), counter=st.integers(0, 2**40), nonce=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_pure_in_any_batch_and_strictly_inside(seed: int, counter: int, nonce: int) -> None:
    one = rng.uniform(torch.tensor([seed]), torch.tensor([counter]), nonce, rng.ACCEPT)
    many = rng.uniform(torch.tensor([1, seed, 7]), torch.tensor([2, counter, 8]), torch.tensor([3, nonce, 9]), rng.ACCEPT)
    assert one[0] == many[1]
    assert 0 < one[0] < 1


def test_values_are_pinned() -> None:
    """A seed must give the same text in the next release."""
    u = rng.uniform(torch.tensor([0, -5]), torch.tensor([1, 2]), torch.tensor([3, 4]), rng.TARGET)
    assert (u * 2**52).long().tolist() == [974167754908380, 1553881084076245]
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    words = torch.tensor([0, 1, -1, 2**62, -2**63, 123456789])
    expected = [mix(w & mask) for w in words.tolist()]
    assert [w & mask for w in rng._mix_(words.clone()).tolist()] == expected


def test_request_seeds_are_distinct() -> None:
    seeds = {rng.request_seed(e, c) for e in (0, 1, -1, 2**63 - 1) for c in range(2000)}
    assert len(seeds) == 8000
    assert all(-2**63 <= s < 2**63 for s in seeds)


def test_inverse_cdf_follows_the_weights_and_never_draws_zero() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    u = rng.uniform(torch.arange(N), torch.zeros(N, dtype=torch.int64), 0, rng.DRAFT)
    drawn = rng.inverse_cdf(probs.expand(N, -1), u)
    assert chi_square(drawn, probs) > SOUND
    assert rng.inverse_cdf(probs.expand(2, -1), torch.tensor([1e-300, 1 - 2.0**-53])).tolist() == [1, 4]


@given(st.lists(st.one_of(st.just(0.0), st.floats(2.0**-40, 1.0, width=32)), min_size=1, max_size=40),
       st.one_of(st.floats(0, 1, exclude_min=True, exclude_max=True), st.sampled_from([5e-324, 1 - 2.0**-53])))
@settings(max_examples=200, deadline=None)
def test_inverse_cdf_draws_only_what_has_weight(weights: list[float], u: float) -> None:
    probs = torch.tensor([weights])
    if probs.sum() == 0:
        return
    drawn = int(rng.inverse_cdf(probs / probs.sum(), torch.tensor([u], dtype=torch.float64))[0])
    assert 0 <= drawn < len(weights)
    assert weights[drawn] > 0
