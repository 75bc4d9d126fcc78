"""Verification where the target's token is known at each position: greedy requests, and those with coupled noise."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsespec.verify.result import VerifyResult, assemble, leading


def match(draft_tokens: Tensor, num_drafts: Tensor, target_tokens: Tensor) -> VerifyResult:
    """Accept drafts up to the first that differs from the target's token, which is then emitted in its place.

    draft_tokens int64 [B, K]; num_drafts [B], 0..K: later columns are ignored; target_tokens int64 [B, K+1]: column j is
    what the target emits after the first j drafts.
    """
    width = draft_tokens.shape[1]
    drafted = torch.arange(width, device=draft_tokens.device) < num_drafts[:, None]
    accepted = leading((draft_tokens == target_tokens[:, :width]) & drafted)
    drafts = torch.where(drafted, draft_tokens, target_tokens[:, :width])
    return assemble(drafts, accepted, target_tokens.gather(1, accepted[:, None]).squeeze(1))
