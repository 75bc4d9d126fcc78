"""Plain decoding: a policy that drafts nothing, so that it is no special path."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsespec.spec.base import DraftPolicy, Verified


class NoDraft(DraftPolicy):
    """Every step verifies zero drafts."""

    name = "none"
    drafts = False

    def select(self, verified: Verified) -> Tensor:
        return torch.empty(self.model.num_layers, self.model.num_kv_heads, 0, dtype=torch.int64)
