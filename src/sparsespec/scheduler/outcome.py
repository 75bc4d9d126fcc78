"""What a step's results mean: which of the tokens count, what ends a request, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsespec.core.plan import StepResult
from sparsespec.core.request import Request


@dataclass(slots=True)
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


class Counters:
    """What the scheduler counts, for stats(). max_drafts: most that a round makes."""

    def __init__(self, max_drafts: int) -> None:
        self.iterations = 0
        self.gemm_rows = 0
        self.num_draft_passes = 0  # sparse items
        self.num_emitted_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_stalled_rows = 0
        self.num_stalled_slots = 0
        self.num_cached_tokens = 0
        # full passes that yielded tokens, by how many drafts they had and by how many of these were accepted
        self._drafted, self._accepted = np.zeros(max_drafts + 1, np.int64), np.zeros(max_drafts + 1, np.int64)

    def count(self, drafted: np.ndarray, accepted: np.ndarray, emitted: int) -> None:
        """Enter full passes [n] of `drafted` drafts, `accepted` of them, that yielded `emitted` tokens together."""
        self._drafted += np.bincount(drafted, minlength=len(self._drafted))
        self._accepted += np.bincount(accepted, minlength=len(self._accepted))
        self.num_emitted_tokens += emitted

    @property
    def num_target_passes(self) -> int:
        """Full passes that yielded tokens."""
        return int(self._drafted.sum())

    @property
    def num_drafts(self) -> int:
        """Those of them that had drafts."""
        return int(self._drafted[1:].sum())

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.drafted_per_position)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def drafted_per_position(self) -> list[int]:
        """How often there was a draft at each position of a round, from the first on."""
        return _reached(self._drafted)

    @property
    def accepted_per_position(self) -> list[int]:
        """How often it was accepted."""
        return _reached(self._accepted)


def _reached(ended: np.ndarray) -> list[int]:
    """From how many ended at each length: how many were longer than each position."""
    reached: list[int] = np.cumsum(ended[:0:-1])[::-1].tolist()
    return reached


def cut(result: StepResult, length: np.ndarray, limit: np.ndarray, min_length: np.ndarray,
        stop_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many of each request's new tokens count [n], whether that ends it, and whether a stop id did.

    length, limit, min_length [n]: tokens it has, at most has, and has before it may stop. stop_ids [n, S], -1 where unused.
    """
    room = limit - length
    counts = np.minimum(result.num_tokens, room)
    stopped = np.zeros(len(counts), bool)
    is_stop = (result.tokens[:, :, None] == stop_ids[:, None, :]).any(-1)
    if is_stop.any():
        column = np.arange(result.tokens.shape[1])
        is_stop &= (length[:, None] + column + 1 >= min_length[:, None]) & (column < counts[:, None])
        stopped = is_stop.any(1)
        counts = np.where(stopped, is_stop.argmax(1) + 1, counts)
    return counts, counts >= room, stopped
