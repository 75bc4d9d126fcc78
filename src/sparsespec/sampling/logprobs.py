"""Log probabilities that requests ask for: always finite and at most 0, whatever the logits.

Two kinds: raw, of the model's own logits; processed, of what the token was drawn from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsespec.core.outputs import Logprob, LogprobDict
from sparsespec.sampling.processors import Rows, process_logits
from sparsespec.sampling.sampler import Sampler

FLOOR = -9999.0
"""Stands for minus infinity, and for what is undefined because the logits were."""


def raw_logprobs(logits: Tensor) -> Tensor:
    """Log-softmax of logits [N, V], float32 [N, V] in [FLOOR, 0]."""
    return torch.log_softmax(logits.to(torch.float32), -1).nan_to_num_(nan=FLOOR, neginf=FLOOR).clamp_(FLOOR, 0.0)


def processed_logprobs(logits: Tensor, rows: Rows, sampler: Sampler, tokens: Tensor) -> Tensor:
    """Log probabilities float32 [N, V] after penalties, temperature and truncation, renormalised; FLOOR where cut.

    Greedy rows have neither temperature nor truncation. logits [N, V] is not changed.
    """
    processed = process_logits(logits, rows, sampler.table, tokens)
    random = sampler.table.random(rows.slots).nonzero().squeeze(1)
    if len(random):
        best = processed.amax(-1)
        cut = sampler.truncated_logits(processed, best, ~best.isfinite(), random, rows)
        processed = processed.index_put((random,), cut)
    return raw_logprobs(processed)


def gather_logprobs(logprobs: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From logprobs float32 [N, V], all at most 0: (logprob [N], rank [N], top_ids [N, num_top], top_logprobs [N, num_top]).

    rank: 1 + the number of strictly more likely tokens. Top tokens come best first, exact ties by the lower id.
    """
    chosen = logprobs.gather(1, token_ids[:, None])
    rank = (logprobs > chosen).sum(-1) + 1
    num_top = min(num_top, logprobs.shape[1])
    # Non-negative floats order as their bits do; the id below them breaks ties, so that the order is the same everywhere.
    bits = logprobs.abs().contiguous().view(torch.int32).to(torch.int64)
    keys = bits.mul_(2**32).add_(torch.arange(logprobs.shape[1], device=logprobs.device))
    top_ids = keys.topk(num_top, largest=False, sorted=True).values.bitwise_and_(2**32 - 1)
    return chosen.squeeze(1), rank, top_ids, logprobs.gather(1, top_ids)


def to_dicts(token_ids: Tensor, logprob: Tensor, rank: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> list[LogprobDict]:
    """One dict a row: the sampled token first, then the top ones that are not it, best first. Tied tokens share a rank."""
    out: list[LogprobDict] = []
    for token, lp, r, ids, lps in zip(token_ids.tolist(), logprob.tolist(), rank.tolist(), top_ids.tolist(),
                                      top_logprobs.tolist(), strict=True):
        row = {token: Logprob(lp, r)}
        shared = 0
        for place, (top, value) in enumerate(zip(ids, lps, strict=True)):
            if place == 0 or value != lps[place - 1]:
                shared = place + 1
            row.setdefault(top, Logprob(value, shared))
        out.append(row)
    return out
