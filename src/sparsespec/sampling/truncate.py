"""Temperature and truncation of sampled rows, in vLLM's order: temperature, min_p, top_k, top_p.

A row's result depends on that row alone, never on its neighbours: a request with a seed must keep its text in any batch.
So cuts are thresholds on the logit, and tokens exactly tied with the last one kept are kept too, whatever order a sort
gives them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsespec.sampling.table import NEG_INF, Feature, SamplingTable

_CANDIDATES = (256, 1024, 8192)
"""top_p looks at this many best tokens first, and sorts the whole vocabulary only for rows that need more."""


def scale_and_truncate(x: Tensor, best: Tensor, slots: Tensor, table: SamplingTable) -> Tensor:
    """Divide sampled rows x [M, V] by their temperature and set what is cut to -inf. Changes x, which must be float32.

    best [M]: the largest logit of each row, finite; slots [M].
    """
    temperature = table.temperature[slots]
    x.div_(temperature[:, None])
    if table.uses(Feature.MIN_P):
        min_p = table.min_p[slots]
        _cut(x, min_p > 0, best / temperature + min_p.log())
    if table.uses(Feature.TOP_K):
        _cut_top_k(x, slots, table)
    if table.uses(Feature.TOP_P):
        _cut_top_p(x, table.top_p[slots])
    return x


def _cut(x: Tensor, on: Tensor, threshold: Tensor) -> None:
    """Forbid what lies below threshold [M], in the rows where `on` [M]."""
    index = on.nonzero().squeeze(1)
    if len(index) == len(x):
        x.masked_fill_(x < threshold[:, None], NEG_INF)
    else:
        part = x[index]
        x[index] = part.masked_fill_(part < threshold[index, None], NEG_INF)


def _cut_top_k(x: Tensor, slots: Tensor, table: SamplingTable) -> None:
    top_k = table.top_k[slots]
    on = top_k < table.vocab_size
    index = on.nonzero().squeeze(1)
    if not len(index):
        return
    best = x[index].topk(table.max_top_k).values
    threshold = torch.full_like(x[:, 0], NEG_INF)
    threshold[index] = best.gather(1, top_k[index, None] - 1).squeeze(1)
    _cut(x, on, threshold)


def _cut_top_p(x: Tensor, top_p: Tensor) -> None:
    """Keep the fewest best tokens whose probabilities reach top_p [M]: those before which less than top_p is spent."""
    threshold = torch.full_like(top_p, NEG_INF)
    total = torch.logsumexp(x, -1)
    index = (top_p < 1).nonzero().squeeze(1)
    for width in (*(c for c in _CANDIDATES if c < x.shape[1]), x.shape[1]):
        if not len(index):
            break
        best = x[index].topk(width).values
        spent = (best - total[index, None]).exp_().cumsum(-1, dtype=torch.float64)
        kept = (spent < top_p[index, None]).sum(-1)  # the token that reaches top_p comes next, and is kept
        found = kept < width
        threshold[index] = best.gather(1, kept.clamp(max=width - 1)[:, None]).squeeze(1)
        index = index[~found]
    _cut(x, top_p < 1, threshold)
