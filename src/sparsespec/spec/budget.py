"""Budgets: the best entries by count, as many as hold a share of the attention mass, or a count shared by layers and heads."""

from __future__ import annotations

from torch import Tensor

from sparsespec.spec.base import Selection

_WIDEST = 4  # times its own share that a layer and head may take of a shared budget


def top_entries(scores: Tensor, most: int, mass: float | None = None, *, shared: bool = False) -> Selection:
    """The `most` best of scores [layers, KV heads, n].

    With `mass`, of these the fewest that hold this share of the total (as Twilight, arXiv 2502.02770). scores are attention
    probabilities averaged over rows: what is missing to 1 lies in the tail, which drafts see anyway and which therefore
    counts as held. With `shared`, the best of all layers and heads together, `most` for each on average.
    """
    most = min(most, scores.shape[-1])
    if not most or (mass is None and not shared):
        return Selection(scores.topk(most, -1, sorted=False).indices)
    best = scores.topk(min(_WIDEST * most, scores.shape[-1]) if shared else most, -1)
    if shared:
        total = most * scores.shape[0] * scores.shape[1]
        counts = (best.values >= best.values.flatten().topk(total).values[-1]).sum(-1)
    else:
        held = best.values.cumsum(-1) + (1 - scores.sum(-1, keepdim=True)).clamp(min=0)
        counts = ((held < (mass or 0.0)).sum(-1) + 1).clamp(max=most)
    width = int(counts.max())
    return Selection(best.indices[..., :width], counts)
