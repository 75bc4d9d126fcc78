"""Verification: exact prefix matching, and rejection sampling against exact enumeration of the target's distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsespec.sampling import rng
from sparsespec.verify.greedy import match
from sparsespec.verify.rejection import rejection
from sparsespec.verify.result import VerifyResult
from stat_utils import BROKEN, SOUND, chi_square

Verify = Callable[..., VerifyResult]


@given(st.integers(0, 5), st.data())
@settings(max_examples=100, deadline=None)
def test_match_against_a_loop(width: int, data: st.DataObject) -> None:
    ids = st.integers(0, 2)
    batch = data.draw(st.integers(1, 4))
    drafts = [[data.draw(ids) for _ in range(width)] for _ in range(batch)]
    target = [[data.draw(ids) for _ in range(width + 1)] for _ in range(batch)]
    count = [data.draw(st.integers(0, width)) for _ in range(batch)]
    shape = torch.zeros(batch, width, dtype=torch.int64)
    got = match(torch.tensor(drafts, dtype=torch.int64).view(shape.shape), torch.tensor(count), torch.tensor(target))
    assert got.tokens.shape == (batch, width + 1)
    assert ((got.tokens >= 0) & (got.tokens <= 2)).all()
    for b in range(batch):
        n = 0
        while n < count[b] and drafts[b][n] == target[b][n]:
            n += 1
        assert got.num_accepted[b] == n
        assert got.num_emitted[b] == n + 1
        assert got.tokens[b, :n + 1].tolist() == target[b][:n + 1]


def test_match_ignores_stale_drafts_of_any_value() -> None:
    got = match(torch.tensor([[5, -7, 10**9]]), torch.tensor([1]), torch.tensor([[5, 6, 7, 8]]))
    assert got.tokens[0, :2].tolist() == [5, 6]
    assert got.num_emitted.tolist() == [2]
    assert (got.tokens < 9).all()
    assert (got.tokens >= 0).all()


@dataclass
class Chain:
    """A language whose next token depends on position and previous token: p, q float32 [K+1, V, V]; the first previous is 0."""

    p: Tensor
    q: Tensor

    @classmethod
    def make(cls, depth: int, vocab: int, seed: int) -> Chain:
        g = torch.Generator().manual_seed(seed)
        shape = (depth + 1, vocab, vocab)
        p, q = ((torch.randn(shape, generator=g) * 1.5).softmax(-1) for _ in range(2))
        q = (p * q).sqrt()  # close enough that drafts get accepted
        p[..., 1] = 0.0  # something the target never says, and the draft does
        return cls(p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True))

    @property
    def vocab(self) -> int:
        return self.p.shape[-1]

    def joint(self) -> Tensor:
        """Exact probabilities [V, ..., V] of the first K+1 tokens."""
        out = self.p[0, 0].double()
        for p in self.p[1:]:
            out = out[..., None] * p.double()
        return out

    def pairs(self) -> list[Tensor]:
        """Exact probabilities [V, V] of each two neighbouring tokens."""
        out, now = [], self.p[0, 0].double()
        for p in self.p[1:]:
            out.append(now[:, None] * p.double())
            now = out[-1].sum(0)
        return out


def run(chain: Chain, n: int, seed: int, verify: Verify, one_hot: bool = False) -> tuple[Tensor, VerifyResult, Tensor]:
    """One round for n requests with 0..K drafts each, continued by plain sampling: (tokens [n, K+1], result, num_drafts)."""
    depth = len(chain.p) - 1
    seeds, base = torch.arange(n) + seed * n, torch.full((n,), 10)
    count = (rng.uniform(seeds, base, 99, rng.TARGET) * (depth + 1)).long()
    previous, drafts, p, q = torch.zeros(n, dtype=torch.int64), [], [], []
    for j in range(depth):
        p.append(chain.p[j, previous])
        q.append(chain.q[j, previous])
        u = rng.uniform(seeds, base + j, 9, rng.DRAFT)
        previous = p[-1].argmax(-1) if one_hot else rng.inverse_cdf(q[-1], u)
        drafts.append(previous)
    p.append(chain.p[depth, previous])
    draft_probs = torch.stack(q, 1)
    unused = torch.arange(depth) >= count[:, None]
    draft_probs[unused] = float("nan")  # columns past num_drafts may hold anything
    target = torch.stack(p, 1)
    target[torch.arange(depth + 1) > count[:, None]] = float("nan")
    accept, residual = (torch.stack([rng.uniform(seeds, base + j, 9, s) for j in range(depth)], 1)
                        for s in (rng.ACCEPT, rng.RESIDUAL))
    bonus = rng.uniform(seeds, base + count, 9, rng.TARGET)
    result = verify(torch.stack(drafts, 1), count, target, None if one_hot else draft_probs, accept, residual, bonus)
    tokens = result.tokens.clone()
    for j in range(1, depth + 1):
        more = rng.inverse_cdf(chain.p[j, tokens[:, j - 1]], rng.uniform(seeds, base + j, 77, rng.TARGET))
        tokens[:, j] = torch.where(j < result.num_emitted, tokens[:, j], more)
    return tokens, result, count


def worst(chain: Chain, tokens: Tensor) -> float:
    """The smallest p-value over the full joint, where it is small enough to enumerate, or all neighbouring pairs."""
    v, width = chain.vocab, tokens.shape[1]
    if v**width <= 5000:
        cell = sum(tokens[:, j] * v**(width - 1 - j) for j in range(width))
        return chi_square(torch.as_tensor(cell), chain.joint())
    return min(chi_square(tokens[:, j] * v + tokens[:, j + 1], pair) for j, pair in enumerate(chain.pairs()))


def broken_emits_p(*args: Tensor) -> VerifyResult:
    """A rejected draft is replaced by a draw from p instead of the residual."""
    drafts, count, p, _, _, residual, _ = args
    good = rejection(*args)
    row = torch.arange(len(drafts))
    u = residual.gather(1, good.num_accepted.clamp(max=drafts.shape[1] - 1)[:, None]).squeeze(1)
    wrong = rng.inverse_cdf(p[row, good.num_accepted], u)
    tokens = good.tokens.clone()
    full = good.num_accepted == count
    tokens[row, good.num_accepted] = torch.where(full, tokens[row, good.num_accepted], wrong)
    return VerifyResult(tokens, good.num_emitted, good.num_accepted)


def broken_accepts_more(*args: Tensor) -> VerifyResult:
    """Accepts twice too readily."""
    return rejection(*args[:4], args[4] * 0.5, *args[5:])


SHAPES = [(1, 16), (2, 16), (3, 16), (4, 16), (3, 4), (4, 4)]


@pytest.mark.parametrize(("depth", "vocab"), SHAPES)
@pytest.mark.parametrize("one_hot", [False, True])
def test_rejection_emits_the_targets_distribution(depth: int, vocab: int, one_hot: bool) -> None:
    for seed in range(3):
        chain = Chain.make(depth, vocab, seed)
        tokens, result, count = run(chain, 60_000, seed, rejection, one_hot)
        assert worst(chain, tokens) >= SOUND
        assert (result.num_accepted <= count).all()
        assert torch.equal(result.num_emitted, result.num_accepted + 1)
        assert ((result.tokens >= 0) & (result.tokens < vocab)).all()
        used = torch.arange(depth + 1) < result.num_emitted[:, None]
        assert not (result.tokens[used] == 1).any()  # p is 0 there
        assert (result.num_accepted > 0).float().mean() > 0.1


@pytest.mark.parametrize(("depth", "vocab"), SHAPES)
@pytest.mark.parametrize("broken", [broken_emits_p, broken_accepts_more])
def test_the_test_has_power(depth: int, vocab: int, broken: Verify) -> None:
    for seed in range(3):
        chain = Chain.make(depth, vocab, seed)
        tokens, _, _ = run(chain, 60_000, seed, broken)
        assert worst(chain, tokens) < BROKEN


def test_acceptance_rate_is_the_overlap() -> None:
    chain = Chain.make(1, 16, 5)
    n = 60_000
    _, result, count = run(chain, n, 5, rejection)
    overlap = torch.minimum(chain.p[0, 0], chain.q[0, 0]).sum()
    rate = result.num_accepted[count == 1].double().mean()
    assert abs(rate - overlap) < 4.5 * 0.5 / (n / 2)**0.5


def test_identical_distributions_accept_everything() -> None:
    p = torch.randn(500, 4, 30, generator=torch.Generator().manual_seed(0)).softmax(-1)
    u = torch.full((500, 3), 1 - 2.0**-53, dtype=torch.float64)
    drafts = rng.inverse_cdf(p[:, :3].reshape(1500, 30), torch.rand(1500, dtype=torch.float64)).view(500, 3)
    result = rejection(drafts, torch.full((500,), 3), p, p[:, :3], u, u, u[:, 0])
    assert (result.num_accepted == 3).all()


@pytest.mark.parametrize("draft_scale", [1.0, 1 + 2.0**-20])
def test_a_residual_without_mass_falls_back_to_p(draft_scale: float) -> None:
    """Forced here by a draft that p forbids and a q that covers p everywhere."""
    p = torch.tensor([[[0.0, 0.75, 0.25], [0.0, 1.0, 0.0]]])
    q = p[:, :1] * draft_scale
    q[0, 0, 0] = 1e-9
    half = torch.full((1, 1), 0.9, dtype=torch.float64)
    result = rejection(torch.tensor([[0]]), torch.tensor([1]), p, q, half, half, half[0])
    assert result.num_accepted.tolist() == [0]
    assert result.tokens[0, 0] == 2


def test_without_drafts_it_is_plain_sampling() -> None:
    p = torch.randn(20_000, 1, 16, generator=torch.Generator().manual_seed(0))[:1].softmax(-1).repeat(20_000, 1, 1)
    u = rng.uniform(torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64), 0, rng.TARGET)
    none = torch.zeros(20_000, 0, dtype=torch.float64)
    for q in (None, torch.zeros(20_000, 0, 16)):
        result = rejection(none.long(), torch.zeros(20_000, dtype=torch.int64), p, q, none, none, u)
        assert torch.equal(result.tokens[:, 0], rng.inverse_cdf(p[:, 0], u))
        assert (result.num_emitted == 1).all()
        assert chi_square(result.tokens[:, 0], p[0, 0]) > SOUND


def test_inputs_are_left_alone() -> None:
    chain = Chain.make(2, 4, 0)
    p, q = chain.p[:, 0].repeat(5, 1, 1), chain.q[:2, 0].repeat(5, 1, 1)
    u = torch.rand(5, 2, dtype=torch.float64)
    drafts, count = torch.randint(0, 4, (5, 2)), torch.tensor([0, 1, 2, 2, 1])
    kept = [t.clone() for t in (drafts, count, p, q, u)]
    rejection(drafts, count, p, q, u, u, u[:, 0])
    assert all(torch.equal(a, b) for a, b in zip(kept, (drafts, count, p, q, u), strict=True))
