"""Pages of the KV pool and who owns them. Integers only: no torch, so that the scheduler can be simulated.

Pages are handed out so that a request's pages stay neighbours where they can: a new request starts in the largest gap
and softly reserves room to grow. Contiguous pages let a backend read KV as one slice instead of gathering it. Soft
reservations are a preference: when nothing else is free they are given away.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
_FREE = -1
_WINDOW = 4096  # pages that a search for single ones looks at together


class PageAllocator:
    """`num_pages` pages; each is free or owned by one owner (a non-negative integer)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.owner: IntArray = np.full(num_pages, _FREE, np.int32)
        self._soft: IntArray = np.full(num_pages, _FREE, np.int32)  # who hopes to grow into a page
        self.num_free = num_pages
        self._unreserved = num_pages  # free pages that nobody hopes for
        self._cursor = 0  # where the search for single pages goes on

    def allocate(self, owner: int, count: int, after: int = -1, expect: int = 0) -> IntArray | None:
        """Take `count` pages for `owner`, or None and no change if fewer are free.

        after: the owner's last page, -1 for a new owner, which then reserves `expect` pages softly.
        """
        if count > self.num_free:
            return None
        if after < 0:
            pages = self._start(owner, count, expect)
        else:
            stop = after + 1 + count
            run = self.owner[after + 1:stop]
            if run.shape[0] == count and (run == _FREE).all():
                pages = np.arange(after + 1, stop, dtype=np.int32)
            else:
                pages = self._scattered(owner, count)
        self._unreserved -= int((self._soft[pages] == _FREE).sum())
        self.owner[pages] = owner
        self.num_free -= count
        return pages

    def free(self, owner: int, pages: IntArray) -> None:
        """Give pages back. Raises ValueError for a page that `owner` does not own."""
        if not (self.owner[pages] == owner).all():
            raise ValueError(f"owner {owner} frees pages that it does not own")
        self.owner[pages] = _FREE
        self._soft[self._soft == owner] = _FREE
        self.num_free += len(pages)
        self._count_unreserved()

    def _start(self, owner: int, count: int, expect: int) -> IntArray:
        for mask in ((self.owner == _FREE) & (self._soft == _FREE), self.owner == _FREE):
            start, length = _largest_gap(mask)
            if length >= count:
                self._soft[start:start + min(max(expect, count), length)] = owner
                self._count_unreserved()
                return np.arange(start, start + count, dtype=np.int32)
        return self._scattered(owner, count)

    def _scattered(self, owner: int, count: int) -> IntArray:
        """Single pages from the cursor on, those that nobody reserved first; a window at a time, as pools are large."""
        found: list[IntArray] = []
        for polite in (True, False):
            if polite and not self._unreserved:
                continue
            for window in range(-(-self.num_pages // _WINDOW)):
                low = (self._cursor // _WINDOW + window) * _WINDOW % (-(-self.num_pages // _WINDOW) * _WINDOW)
                free = self.owner[low:low + _WINDOW] == _FREE
                soft = self._soft[low:low + _WINDOW]
                free &= (soft == _FREE) if polite else (soft != _FREE)
                pages = (np.flatnonzero(free)[:count] + low).astype(np.int32)
                count -= len(pages)
                found.append(pages)
                if not count:
                    self._cursor = low
                    return np.concatenate(found)
        raise RuntimeError("fewer pages are free than counted")

    def _count_unreserved(self) -> None:
        self._unreserved = int(((self.owner == _FREE) & (self._soft == _FREE)).sum())

    def check(self) -> None:
        """Integrity: raises RuntimeError unless free + owned = total."""
        if int((self.owner == _FREE).sum()) != self.num_free:
            raise RuntimeError(f"page accounting is off: {int((self.owner == _FREE).sum())} pages free, counter {self.num_free}")


def _largest_gap(mask: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """(start, length) of the longest run of True; length 0 where there is none."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    starts, stops = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    best = int(np.argmax(stops - starts))
    return int(starts[best]), int(stops[best] - starts[best])
