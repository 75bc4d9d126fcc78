"""Budgets: the best entries by count, or as many as hold a share of the attention mass (as Twilight, arXiv 2502.02770)."""

from __future__ import annotations

from torch import Tensor

from sparsespec.spec.base import Selection


def top_entries(scores: Tensor, most: int, mass: float | None = None) -> Selection:
    """The `most` best of scores [layers, KV heads, n]; with `mass`, of these the fewest that hold this share of the total.

    scores are attention probabilities averaged over rows: what is missing to 1 lies in the tail, which drafts see anyway
    and which therefore counts as held.
    """
    most = min(most, scores.shape[-1])
    if mass is None or not most:
        return Selection(scores.topk(most, -1, sorted=False).indices)
    best = scores.topk(most, -1)
    held = best.values.cumsum(-1) + (1 - scores.sum(-1, keepdim=True)).clamp(min=0)
    counts = ((held < mass).sum(-1) + 1).clamp(max=most)
    width = int(counts.max())
    return Selection(best.indices[..., :width], counts)
