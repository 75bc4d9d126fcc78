"""The fused attention kernel against explicit masks in float64: mixed batches, page sizes, head sizes, cut tiles, scores."""

from __future__ import annotations

import kernel_env  # noqa: F401 (before the kernels)
import numpy as np
import pytest
import torch

from kernel_cases import Case, error
from sparsespec.attention.fused import Launch, Shape

pytestmark = pytest.mark.usefixtures("one_thread")
LAUNCH = Launch(large_rows=32, block=16)


def check(case: Case, programs: int, tolerance: float = 1e-5) -> None:
    """Outputs, LSEs of sparse rows, exact scores."""
    fused = case.fused(programs, LAUNCH)
    for layer in range(case.shape.layers):
        wanted, probs, lses = case.expected(layer)
        found = fused.run(layer, case.q[layer], *case.cache[layer])
        assert error(found, wanted) < tolerance
        for i in range(len(case.items.rows)):
            if case.items.sparse[i]:
                rows = case.items.starts[i] + np.arange(case.items.rows[i])
                kept = fused.lse[int(case.items.slots[i]), layer, torch.from_numpy(rows) % case.shape.ring]
                assert error(kept, lses[i].permute(2, 0, 1).flatten(1)) < tolerance
            count = int(case.items.score_rows[i])
            keys = int(fused.score_lengths[i])
            if count and keys:
                mean = probs[i][:, :, -count:, :keys].mean((1, 2))
                assert error(fused.mean_scores(i)[layer], mean) < tolerance


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page_size"), [
    (4, 2, 64, 16), (4, 1, 96, 4), (2, 2, 128, 1), (6, 2, 64, 64), (2, 1, 256, 32), (3, 1, 16, 2)])
def test_mixed_batches(heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    """Drafts of one row and of several, plain decode, verification, a prompt in one chunk and one in the middle."""
    shape = Shape(2, heads, kv_heads, head_dim, page_size, ring=16)
    case = Case.random(shape, [1, 1, 3, 1, 5, 9, 20], [40, 9, 33, 75, 41, 50, 20], 3, seed=heads, score_rows=5)
    check(case, programs=5)


@pytest.mark.parametrize("programs", [1, 2, 7, 40])
@pytest.mark.parametrize("seed", range(2))
def test_shares_of_any_size(programs: int, seed: int) -> None:
    """However many programs share the work, and wherever tiles are cut."""
    rng = np.random.default_rng(seed)
    rows = [1, 2, *rng.integers(1, 9, 5).tolist()]
    lengths = [int(r + rng.integers(0, 150)) for r in rows]
    check(Case.random(Shape(1, 4, 2, 32, 8, ring=16), rows, lengths, 3, seed, score_rows=9), programs)
