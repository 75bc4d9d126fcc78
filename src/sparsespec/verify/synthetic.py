"""Acceptance by chance, for benchmarks with weights that mean nothing. Its output is not lossless and is marked so."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsespec.verify.result import VerifyResult


def synthetic(draft_tokens: Tensor, num_drafts: Tensor, target_tokens: Tensor, u: Tensor, rate: float) -> VerifyResult:
    """Accept each of draft_tokens [B, K] while u [B, K] < rate, then the target's token of target_tokens [B, K+1]."""
    width = draft_tokens.shape[1]
    kept = (u < rate) & (torch.arange(width, device=u.device) < num_drafts[:, None])
    accepted = kept.long().cumprod(1).sum(1)
    column = torch.arange(width + 1, device=u.device)
    padded = torch.cat((draft_tokens, target_tokens[:, :1]), 1)
    tokens = torch.where(column < accepted[:, None], padded, target_tokens)
    return VerifyResult(tokens, accepted + 1, accepted)
