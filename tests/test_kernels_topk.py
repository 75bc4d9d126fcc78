"""Top-k over ragged rows against torch.topk: ties, zeros, rows in registers and rows read in blocks."""

from __future__ import annotations

import kernel_env  # noqa: F401 (before the kernels)
import numpy as np
import pytest
import torch

from sparsespec.kernels import topk

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("block", [128, 512])
@pytest.mark.parametrize("seed", range(4))
def test_topk_of_ragged_rows(block: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the k largest of each row and nothing else written; k may pass the row, and be 0 or negative."""
    monkeypatch.setattr(topk, "MAX_BLOCK", block)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    layers, heads, width = 2, 2, 40
    lengths = torch.tensor([*rng.integers(1, 400, 4).tolist(), 3, 0], dtype=torch.int32)
    k = torch.tensor([1, 40, 17, -1, 9, 5], dtype=torch.int32)
    starts = (lengths.cumsum(0) - lengths).int()
    scores = torch.rand(layers, heads, int(lengths.sum()), generator=generator) ** 8
    if seed % 2:
        scores = (scores * 6).round() / 6  # many ties, many zeros
    slots = torch.from_numpy(rng.permutation(8)[:6].astype(np.int32))
    positions = torch.full((8, layers, heads, width), -7, dtype=torch.int32)
    counts = torch.full((8, layers, heads), -7, dtype=torch.int32)
    topk.select_topk(scores, starts, lengths, k, slots, positions, counts, int(lengths.max()))
    for i, slot in enumerate(slots.tolist()):
        n = min(int(k[i]), int(lengths[i]))
        if n < 0:
            assert (counts[slot] == -7).all()
            n = 0
        else:
            assert (counts[slot] == n).all()
        assert (positions[slot, :, :, n:] == -7).all()
        for place in np.ndindex(layers, heads):
            row = scores[place][int(starts[i]):int(starts[i]) + int(lengths[i])]
            found = positions[slot][place][:n].long()
            assert len(set(found.tolist())) == n
            assert torch.equal(row[found].sort().values, row.topk(n).values.sort().values)
