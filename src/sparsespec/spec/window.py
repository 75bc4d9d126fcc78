"""Sliding window (StreamingLLM, arXiv 2309.17453): the first tokens and the latest ones, at their true positions.

The window is refreshed at each verification, and drafts are appended to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsespec.spec.base import DraftPolicy, Selection, Verified


class Window(DraftPolicy):
    """`num_sink_tokens` first tokens, and recent ones up to the budget, max(min_budget, sparse_attn_ratio of the context)."""

    name = "window"
    selects = True

    def select(self, verified: Verified) -> Selection:
        return Selection(self.everywhere(self.window(verified.tail, self.budget(verified.length))))

    def window(self, tail: int, budget: int) -> Tensor:
        """Positions [n] below `tail`: sinks, then the most recent; all of them where the budget holds them."""
        sinks = min(self.config.num_sink_tokens, budget, tail)
        return torch.cat((torch.arange(sinks), torch.arange(max(sinks, tail - (budget - sinks)), tail)))

    def everywhere(self, positions: Tensor) -> Tensor:
        """Positions [n] for every layer and KV head [layers, KV heads, n]."""
        return positions.expand(self.model.num_layers, self.model.num_kv_heads, -1)
