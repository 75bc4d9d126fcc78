"""MagicDec (arXiv 2408.11049): self-speculation over a small KV budget, in its two forms.

stream: attention sinks and a recent window. snapkv: at the prompt's end the attention of the last 32 queries, pooled over
neighbouring keys, picks tokens per KV head, which stay fixed (SnapKV, arXiv 2404.14469); what comes after the prompt is
seen through a window of 32.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sparsespec.spec.base import Selection, Verified
from sparsespec.spec.window import Window

_QUERIES = 32  # rows that vote, and recent tokens that are always seen
_POOL = 7  # neighbouring keys that share a vote


class MagicDec(Window):
    """`magicdec_variant` stream or snapkv; `num_sink_tokens` is 32, as SparseSpec's comparison had it."""

    name = "magicdec"

    def wants_scores(self, prompt: bool) -> bool:
        return prompt and self.config.magicdec_variant == "snapkv"

    def score_rows(self, rows: int, prompt: bool) -> int:
        return min(rows, _QUERIES) if self.wants_scores(prompt) else super().score_rows(rows, prompt)

    def observe(self, probs: Tensor, out: Tensor) -> None:
        out[:, 0] = probs[..., :out.shape[-1]].mean((1, 2))

    def select(self, verified: Verified) -> Selection:
        if self.config.magicdec_variant == "stream":
            return super().select(verified)
        if verified.scores is not None:
            votes = verified.scores[:, :, 0]
            if verified.tail:
                votes = F.avg_pool1d(votes, _POOL, 1, _POOL // 2, count_include_pad=False)
            most = min(max(self.budget(verified.length) - _QUERIES, 1), verified.tail)
            self.state[verified.slot] = votes.topk(most, -1, sorted=False).indices, verified.tail
        chosen, end = self.state[verified.slot]
        return Selection(chosen, tail=max(end, verified.tail - _QUERIES))
