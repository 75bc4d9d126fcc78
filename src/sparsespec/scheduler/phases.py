"""When a round verifies: the draft buckets that keep iterations alike (SparseSpec, section 4.2).

A round of j drafts begun now verifies j + 1 iterations on. A calendar counts the verifications due in each coming
iteration; k + 1 neighbouring days are the k + 1 phase buckets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np


class Phases(ABC):
    """Chooses how many drafts a request's next round makes."""

    def __init__(self, max_drafts: int, slots: int) -> None:
        self._due = np.zeros(max_drafts + 2, np.int64)  # verifications by iteration, modulo its size
        self._day = np.full(slots, -1, np.int64)

    def begin(self, now: int, slot: int, most: int) -> int:
        """Drafts of the round that `slot` begins after iteration `now`, at most `most`; entered in the calendar."""
        self.end(slot)
        drafts = self.choose(now, most)
        day = (now + 1 + drafts) % len(self._due)
        self._due[day] += 1
        self._day[slot] = day
        return drafts

    def due(self, now: int, slot: int) -> None:
        """The slot's round verifies in the next iteration, whatever was planned."""
        self.end(slot)
        day = (now + 1) % len(self._due)
        self._due[day] += 1
        self._day[slot] = day

    def end(self, slot: int) -> None:
        """The slot's round is over, verified or not."""
        if self._day[slot] >= 0:
            self._due[self._day[slot]] -= 1
            self._day[slot] = -1

    @abstractmethod
    def choose(self, now: int, most: int) -> int:
        """How many drafts, from 0 to `most`."""


class Unified(Phases):
    """Least-loaded bucket, and a full round among equals.

    A round is shortened only where that moves the request to a bucket with fewer verifications than its own would then
    have. So requests that start together spread at once, and buckets that empty when requests end fill again.
    """

    def choose(self, now: int, most: int) -> int:
        days = (now + 1 + np.arange(most, -1, -1)) % len(self._due)
        return most - int(np.argmin(self._due[days]))  # argmin takes the first, which drafts most


class Lockstep(Phases):
    """All requests draft, then all verify: the comparison."""

    def choose(self, now: int, most: int) -> int:
        for drafts in range(most, -1, -1):
            if self._due[(now + 1 + drafts) % len(self._due)]:
                return drafts
        return most


def make_phases(schedule: str, max_drafts: int, slots: int) -> Phases:
    """Phases for the configured schedule."""
    return (Lockstep if schedule == "lockstep" else Unified)(max_drafts, slots)
