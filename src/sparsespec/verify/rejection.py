"""Rejection sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv 2302.01318).

A draft x from q is accepted with probability min(1, p(x) / q(x)); at the first rejection the token comes from
max(p - q, 0), renormalised; after K acceptances one more comes from p. What is emitted is distributed as p exactly,
provided that q is what each draft was drawn from and that the uniforms are independent of the drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsespec.sampling.rng import SMALLEST_WEIGHT, inverse_cdf
from sparsespec.verify.result import VerifyResult, assemble, leading


def rejection(draft_tokens: Tensor, num_drafts: Tensor, target_probs: Tensor, draft_probs: Tensor | None, accept_u: Tensor,
              residual_u: Tensor, bonus_u: Tensor) -> VerifyResult:
    """Verify drafts of B requests.

    draft_tokens int64 [B, K]; num_drafts [B], 0..K: drafts and probabilities of later columns are ignored, whatever they
    hold. target_probs float32 [B, K+1, V]: column j is p after the first j drafts. draft_probs float32 [B, K, V]: what
    each draft was drawn from; None if drafts were certain (one-hot). accept_u, residual_u [B, K], bonus_u [B]: float64
    uniforms in (0, 1), all independent.

    Needs two [B, V] copies, since the residual is wanted in one column alone.
    """
    width = draft_tokens.shape[1]
    drafted = torch.arange(width, device=draft_tokens.device) < num_drafts[:, None]
    drafts = torch.where(drafted, draft_tokens, 0)
    p = target_probs[:, :width].gather(2, drafts[:, :, None]).squeeze(2).to(torch.float64)
    if draft_probs is None:
        q = torch.ones_like(p)
    else:
        q = draft_probs.gather(2, drafts[:, :, None]).squeeze(2).to(torch.float64)
    accepted = leading((accept_u * q < p) & drafted)
    full = accepted == num_drafts
    weights, u = _own_weights(drafts, accepted, full, target_probs, draft_probs), bonus_u
    if width:
        u = torch.where(full, bonus_u, residual_u.gather(1, accepted.clamp(max=width - 1)[:, None]).squeeze(1))
    return assemble(drafts, accepted, inverse_cdf(weights, u))


def _own_weights(drafts: Tensor, accepted: Tensor, full: Tensor, target_probs: Tensor, draft_probs: Tensor | None) -> Tensor:
    """Weights [B, V], not normalised, of the token after the accepted drafts: the residual, or p where `full`."""
    row = torch.arange(len(accepted), device=accepted.device)
    p = target_probs[row, accepted]
    width = drafts.shape[1]
    if not width:
        return p
    last = accepted.clamp(max=width - 1)
    if draft_probs is None:
        residual = p.scatter(1, drafts.gather(1, last[:, None]), 0.0)
    else:
        residual = draft_probs[row, last].neg_().add_(p).clamp_(min=0.0)
    # p == q up to rounding can leave nothing, and was rejected by rounding alone: p is then the limit of the residual.
    # (A full row may hold NaN here, of a column that was never drafted.)
    use_p = full | ~(residual.amax(-1) >= SMALLEST_WEIGHT)
    return torch.where(use_p[:, None], p, residual)
