"""When a round verifies: the draft buckets that keep iterations alike (SparseSpec, section 4.2).

A round of j drafts begun now verifies j + 1 iterations on. A calendar counts the verifications due in each coming
iteration; k + 1 neighbouring days are the k + 1 phase buckets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np


class Phases(ABC):
    """Chooses how many drafts the next rounds of requests make."""

    def __init__(self, max_drafts: int, slots: int) -> None:
        self._days = max_drafts + 2  # of the calendar, which goes round
        self._due = np.zeros(self._days + 1, np.int64)  # verifications by day; the last entry: slots without a round
        self._day = np.full(slots, self._days, np.int64)

    def begin(self, now: int, slots: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Drafts [n] of the rounds that distinct `slots` [n] begin after iteration `now`, at most `most` [n], one after the
        other: each sees the load that those before it made. The rounds that they end have left the calendar by then."""
        longest = int(most.max(initial=0))
        days = (now + 1 + np.arange(longest, -1, -1)) % self._days
        loads: list[int] = (self._due - self._count(self._day[slots]))[days].tolist()
        drafts = []
        for skipped in (longest - most).tolist():
            day = skipped + self.choose(loads[skipped:] if skipped else loads)
            loads[day] += 1
            drafts.append(longest - day)
        chosen = np.array(drafts, np.int64)
        self._move(slots, (now + 1 + chosen) % self._days)
        return chosen

    def due(self, now: int, slots: np.ndarray) -> None:
        """The rounds of distinct `slots` [n] verify in the next iteration, whatever was planned."""
        self._move(slots, np.full(len(slots), (now + 1) % self._days))

    def end(self, slots: np.ndarray) -> None:
        """The rounds of distinct `slots` [n] are over, verified or not."""
        self._move(slots, np.full(len(slots), self._days))

    def _move(self, slots: np.ndarray, days: np.ndarray) -> None:
        self._due += self._count(days) - self._count(self._day[slots])
        self._day[slots] = days

    def _count(self, days: np.ndarray) -> np.ndarray:
        return np.bincount(days, minlength=len(self._due))

    @abstractmethod
    def choose(self, loads: list[int]) -> int:
        """Index of the bucket that one round takes. loads: verifications due in each, that of the longest round first."""


class Unified(Phases):
    """Least-loaded bucket, and a full round among equals.

    A round is shortened only where that moves the request to a bucket with fewer verifications than its own would then
    have. So requests that start together spread at once, and buckets that empty when requests end fill again.
    """

    def choose(self, loads: list[int]) -> int:
        return loads.index(min(loads))


class Lockstep(Phases):
    """All requests draft, then all verify: the comparison."""

    def choose(self, loads: list[int]) -> int:
        return next((i for i, load in enumerate(loads) if load), 0)


def make_phases(schedule: str, max_drafts: int, slots: int) -> Phases:
    """Phases for the configured schedule."""
    return (Lockstep if schedule == "lockstep" else Unified)(max_drafts, slots)
