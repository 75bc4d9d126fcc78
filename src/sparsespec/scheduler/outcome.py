"""What a step's results mean: which of the tokens count, what ends a request, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sparsespec.core.plan import StepResult
from sparsespec.core.request import Request


@dataclass
class Commit:
    """Tokens that one request gained, and whether an EOS or stop id ended it (`stop`), or a limit (`length`).

    bad: the logits after these tokens are NaN or infinite, so it cannot go on.
    """

    request: Request
    item: int
    tokens: list[int]
    drafted: int
    accepted: int
    finish_reason: str | None
    stop_token: int | None
    bad: bool = False


@dataclass
class Counters:
    """What the scheduler counts, for stats()."""

    iterations: int = 0
    gemm_rows: int = 0
    num_prompt_tokens: int = 0
    num_draft_passes: int = 0  # sparse items; num_target_passes: full ones that yielded tokens
    num_target_passes: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_stalled_rows: int = 0
    num_cached_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)

    def count(self, drafted: np.ndarray, accepted: np.ndarray, emitted: np.ndarray) -> None:
        """Enter full passes [n] of `drafted` drafts that yielded `emitted` tokens."""
        self.num_target_passes += len(drafted)
        self.num_drafts += int((drafted > 0).sum())
        self.num_draft_tokens += int(drafted.sum())
        self.num_accepted_tokens += int(accepted[drafted > 0].sum())
        self.num_emitted_tokens += int(emitted.sum())
        for position in range(int(drafted.max(initial=0))):
            self.accepted_per_position[position] += int((accepted > position).sum())
            self.drafted_per_position[position] += int((drafted > position).sum())


def cut(result: StepResult, length: np.ndarray, limit: np.ndarray, min_length: np.ndarray,
        stop_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many of each request's new tokens count [n], whether that ends it, and whether a stop id did.

    length, limit, min_length [n]: tokens it has, at most has, and has before it may stop. stop_ids [n, S], -1 where unused.
    """
    width = result.tokens.shape[1]
    column = np.arange(width)
    counts = np.minimum(result.num_tokens, limit - length)
    place = length[:, None] + column  # index of the token in its sequence
    is_stop = (result.tokens[:, :, None] == stop_ids[:, None, :]).any(-1)
    is_stop &= (place + 1 >= min_length[:, None]) & (column < counts[:, None])
    first = np.where(is_stop.any(1), is_stop.argmax(1), width)
    stopped = first < counts
    counts = np.where(stopped, first + 1, counts)
    return counts, length + counts >= limit, stopped
