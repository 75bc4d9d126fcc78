"""What a verification decides."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class VerifyResult:
    """tokens int64 [B, K+1]: accepted drafts, then the target's own token; valid ids without meaning beyond num_emitted.

    num_emitted int64 [B] = num_accepted [B] + 1.
    """

    tokens: Tensor
    num_emitted: Tensor
    num_accepted: Tensor


def assemble(draft_tokens: Tensor, num_accepted: Tensor, own: Tensor) -> VerifyResult:
    """Put the target's own token [B] after the accepted ones of draft_tokens [B, K]."""
    tokens = own[:, None].repeat(1, draft_tokens.shape[1] + 1)
    tokens[:, :-1] = draft_tokens
    tokens.scatter_(1, num_accepted[:, None], own[:, None])
    return VerifyResult(tokens, num_accepted + 1, num_accepted)


def leading(accept: Tensor) -> Tensor:
    """int64 [B]: how many leading columns of accept, bool [B, K], are true."""
    return accept.long().cumprod(1).sum(1)
