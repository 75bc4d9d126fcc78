"""From logits to distributions, and from distributions to tokens.

Greedy rows pay for one pass (the maximum) and no more. Sampled rows are of two kinds, fixed by how a request is seated:

- coupled (the request has a seed of its own): the token at a position is argmax(log p + g(seed, position)), g Gumbel
  noise. A draft from the same noise is likely to agree, and the token that the target emits does not depend on drafts,
  batch, number of drafts or policy: same seed, same text.
- the others: drafts come from the inverse CDF and are verified by rejection sampling, which accepts more. Its numbers
  must be fresh in each round (see rng), hence the nonce: the position of the round's first row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsespec.sampling import rng
from sparsespec.sampling.processors import Rows, process_logits
from sparsespec.sampling.table import Feature, SamplingTable
from sparsespec.sampling.truncate import scale_and_truncate

__all__ = ["Distribution", "Rows", "Sampler", "draw", "draw_coupled"]


@dataclass(frozen=True)
class Distribution:
    """What N rows may become.

    argmax int64 [N]: most likely token, the lowest id on exact ties. bad bool [N]: the row's largest logit is NaN or
    infinite (model output broken, or every token forbidden); its tokens mean nothing but are valid ids.
    index int64 [N]: the row of probs, -1 for greedy rows. random int64 [M]: the sampled rows, in order. probs float32
    [M, V]: their probabilities after temperature and truncation (uniform where bad); None if M is 0. logits [N, V]: what
    these were made from, penalties and masks applied.
    """

    argmax: Tensor
    bad: Tensor
    index: Tensor
    random: Tensor
    probs: Tensor | None
    logits: Tensor

    def probability(self, tokens: Tensor, rows: Tensor | None = None) -> Tensor:
        """float32 [n]: each row's probability of its token (greedy rows: at temperature 1). rows [n]: which, None for all."""
        logits = self.logits if rows is None else self.logits[rows]
        index = self.index if rows is None else self.index[rows]
        out = (logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)).exp()
        if self.probs is None:
            return out
        return torch.where(index < 0, out, self.probs[index.clamp(min=0)].gather(1, tokens[:, None]).squeeze(1))


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Tokens int64 [N] by inverse CDF from probs float32 [N, V] and u [N] in (0, 1); none of probability 0."""
    return rng.inverse_cdf(probs, u)


def draw_coupled(probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Tokens int64 [N]: argmax(log p + g(seed, position)) over probs float32 [N, V]; none of probability 0.

    Computed as the race that it equals, argmax(p / e) with e = exp(-g): two passes fewer.
    """
    return probs.div(rng.exponential(seeds, positions, probs.shape[-1], rng.COUPLED)).argmax(-1)


class Sampler:
    """Reads a SamplingTable, which the caller keeps up to date."""

    def __init__(self, table: SamplingTable) -> None:
        self.table = table

    def distribution(self, logits: Tensor, rows: Rows, tokens: Tensor) -> Distribution:
        """See Distribution. logits [N, V], left unchanged; tokens int64 [max_num_seqs, max_len]."""
        processed = process_logits(logits, rows, self.table, tokens)
        best, argmax = processed.max(-1)
        bad = ~best.isfinite()
        random = self._random_rows(rows)
        index = torch.full_like(argmax, -1)
        if not len(random):
            return Distribution(argmax, bad, index, random, None, processed)
        index[random] = torch.arange(len(random), device=index.device)
        probs = self.truncated_logits(processed, best, bad, random, rows).softmax(-1)
        return Distribution(argmax, bad, index, random, probs, processed)

    def truncated_logits(self, processed: Tensor, best: Tensor, bad: Tensor, random: Tensor, rows: Rows) -> Tensor:
        """Logits float32 [M, V] of the sampled rows `random` [M] after temperature and truncation; 0 where bad."""
        x = processed[random]
        broken = bad[random]
        if x.device.type != "cpu" or bool(broken.any()):  # asking costs nothing on the CPU and a wait elsewhere
            x.masked_fill_(broken[:, None], 0.0)
        top = best[random].masked_fill(broken, 0.0)
        return scale_and_truncate(x, top, rows.slots[random], self.table)

    def sample_draft(self, dist: Distribution, rows: Rows, nonce: Tensor, stream: int = rng.DRAFT) -> Tensor:
        """Tokens int64 [N] to propose: argmax, the coupled draw, or a draw of its own for each (seed, position, nonce [N])."""
        out = dist.argmax.clone()
        self._fill_coupled(out, dist, rows)
        free = self._part(dist, rows, Feature.REJECTION)
        if free is not None and dist.probs is not None:
            where = dist.random[free]
            seeds = self.table.seed[rows.slots[where]]
            out[where] = draw(dist.probs[free], rng.uniform(seeds, rows.positions[where], nonce[where], stream))
        return out

    def sample_target_tokens(self, dist: Distribution, rows: Rows) -> Tensor:
        """Tokens int64 [N]: the target's own at each greedy or coupled row; argmax, to be ignored, at the others."""
        out = dist.argmax.clone()
        self._fill_coupled(out, dist, rows)
        return out

    def _fill_coupled(self, out: Tensor, dist: Distribution, rows: Rows) -> None:
        part = self._part(dist, rows, Feature.COUPLED)
        if part is not None and dist.probs is not None:
            where = dist.random[part]
            out[where] = draw_coupled(dist.probs[part], self.table.seed[rows.slots[where]], rows.positions[where])

    def _random_rows(self, rows: Rows) -> Tensor:
        """int64 [M], without asking the device where the table's counts can tell."""
        slots = rows.slots
        if not self.table.uses(Feature.RANDOM):
            return slots.new_empty(0)
        if self.table.all_use(Feature.RANDOM):
            return torch.arange(len(slots), device=slots.device)
        return self.table.random(slots).nonzero().squeeze(1)

    def _part(self, dist: Distribution, rows: Rows, kind: Feature) -> Tensor | slice | None:
        """Which rows of dist.probs are of a kind, COUPLED or REJECTION; None if none can be."""
        other = Feature.REJECTION if kind is Feature.COUPLED else Feature.COUPLED
        if dist.probs is None or not self.table.uses(kind):
            return None
        if not self.table.uses(other):
            return slice(None)
        coupled = self.table.coupled(rows.slots[dist.random])
        return (coupled if kind is Feature.COUPLED else ~coupled).nonzero().squeeze(1)
