"""SpecAttn (arXiv 2602.07223): verification-guided selection from two rows, one for all heads of a layer.

The attention of the first and the last verified row, averaged over all query heads, ranks the entries. At the prompt's
end the last row alone does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsespec.spec.base import DraftPolicy, Selection, Verified
from sparsespec.spec.budget import top_entries


class SpecAttn(DraftPolicy):
    """The budget is sparse_attn_ratio of the context, at least min_budget and at most that share of the longest context."""

    name = "specattn"
    selects = True
    uses_scores = True

    def base_budget(self, length: int) -> int:
        ratio = self.config.sparse_attn_ratio
        least = self.config.min_budget
        return min(max(math.ceil(ratio * length), least), max(least, math.ceil(ratio * self.model.max_position_embeddings)))

    def score_rows(self, rows: int, prompt: bool) -> int:
        return 1 if prompt else super().score_rows(rows, prompt)

    def observe(self, probs: Tensor, out: Tensor) -> None:
        ends = torch.stack((probs[:, :, 0], probs[:, :, -1]))[..., :out.shape[-1]]
        out[:, 0] = ends.mean((0, 1, 2))

    def select(self, verified: Verified) -> Selection:
        if verified.scores is None:
            raise ValueError("specattn selects from scores, and none were collected")
        shared = top_entries(verified.scores[:, :1, 0], self.budget(verified.length), self.config.sparse_attn_mass)
        heads = self.model.num_kv_heads
        counts = shared.counts.expand(-1, heads) if shared.counts is not None else None
        return Selection(shared.positions.expand(-1, heads, -1), counts)
