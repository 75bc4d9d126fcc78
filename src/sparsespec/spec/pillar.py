"""PillarAttn (SparseSpec, arXiv 2512.01278, section 4.1): the verification's own attention picks what drafts see.

Verification computes full attention anyway. Its probabilities, averaged over the verified rows and the query heads of
a KV head, rank the entries; the best `budget` of each layer and KV head are seen by the next k drafts, besides all
entries from the last verification's first row on. No forced sinks, no fixed recent window. The last prefill chunk is
scored too, so that the first round is already sparse.
"""

from __future__ import annotations

from torch import Tensor

from sparsespec.spec.base import DraftPolicy, Verified


class Pillar(DraftPolicy):
    """`score_rows` "all" averages over every verified row; "accepted" leaves out the rows of rejected drafts."""

    name = "pillar"
    uses_scores = True

    @property
    def keeps_rows(self) -> bool:
        return self.config.score_rows == "accepted"

    def observe(self, probs: Tensor, out: Tensor) -> None:
        seen = probs[..., :out.shape[-1]]
        if self.keeps_rows:
            out.copy_(seen.mean(1))
        else:
            out[:, 0] = seen.mean((1, 2))

    def select(self, verified: Verified) -> Tensor:
        if verified.scores is None:
            raise ValueError("pillar selects from scores, and none were collected")
        scores = verified.scores[:, :, :verified.accepted].mean(2) if self.keeps_rows else verified.scores[:, :, 0]
        return scores.topk(min(self.budget(verified.length), verified.tail), -1, sorted=False).indices
