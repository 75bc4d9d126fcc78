"""PillarAttn (SparseSpec, arXiv 2512.01278, section 4.1): the verification's own attention picks what drafts see.

Verification computes full attention anyway. Its probabilities, reduced over the verified rows and the query heads of
a KV head, rank the entries; the best `budget` of each layer and KV head are seen by the next k drafts, besides all
entries from the last verification's first row on. No forced sinks, no fixed recent window. The last prefill chunk is
scored too, so that the first round is already sparse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsespec.spec.base import DraftPolicy, Selection, Verified
from sparsespec.spec.budget import top_entries


class Pillar(DraftPolicy):
    """`score_rows` "all" averages over every verified row, "accepted" leaves out the rows of rejected drafts, "ends" takes the
    first and the last. `score_group` "mean" or "max" over the query heads of a KV head. `score_spread` w gives an entry the
    best score of itself and the w before it: where text repeats, attention moves on along the earlier copy with each token,
    so that drafts look just behind what the verification looked at."""

    name = "pillar"
    selects = True
    uses_scores = True

    @property
    def averages(self) -> bool:
        return self.config.score_rows == "all" and self.config.score_group == "mean"

    def kept_rows(self, rows: int) -> int:
        return rows if self.config.score_rows == "accepted" else 1

    def observe(self, probs: Tensor, out: Tensor) -> None:
        seen = probs[..., :out.shape[-1]]
        if self.config.score_rows == "ends" and seen.shape[2] > 2:
            seen = torch.stack((seen[:, :, 0], seen[:, :, -1]), 2)
        if self.config.score_group == "max":
            heads = seen.amax(1)
            out.copy_(heads if out.shape[1] == heads.shape[1] else heads.mean(1, keepdim=True))
        elif out.shape[1] > 1:
            out.copy_(seen.mean(1))
        else:
            out[:, 0] = seen.mean((1, 2))

    def select(self, verified: Verified) -> Selection:
        if verified.scores is None:
            raise ValueError("pillar selects from scores, and none were collected")
        kept = verified.scores.shape[2]
        scores = verified.scores[:, :, :verified.accepted].mean(2) if kept > 1 else verified.scores[:, :, 0]
        spread = min(self.config.score_spread, scores.shape[-1] - 1)
        if spread > 0:
            scores = F.max_pool1d(F.pad(scores, (spread, 0)), spread + 1, 1)
        return top_entries(scores, self.budget(verified.length), self.config.sparse_attn_mass,
                           shared=self.config.shared_budget)
