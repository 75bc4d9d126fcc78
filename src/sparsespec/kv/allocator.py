"""Pages of a KV pool: which are free, and how often the others are held. Integers only: no torch, so that it can be simulated.

Pages are handed out so that a request's pages stay neighbours where they can: a new request starts in the largest gap
and softly reserves room to grow. Contiguous pages let a backend read KV as one slice instead of gathering it. Soft
reservations are a preference: when nothing else is free they are given away.

Who holds a page (a slot, the prefix cache, a copy that is under way) is the holders' business; here is only how many do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
NO_PAGES: IntArray = np.zeros(0, np.int32)
_NOBODY = -1
_WINDOW = 4096  # pages that a search for single ones looks at together


class PageAllocator:
    """`num_pages` pages. refs [num_pages]: how many hold each; 0 is free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs: IntArray = np.zeros(num_pages, np.int32)
        self._soft: IntArray = np.full(num_pages, _NOBODY, np.int32)  # who hopes to grow into a page
        self._hopes: dict[int, list[slice]] = {}  # by owner: where its soft reservations may be
        self.num_free = num_pages
        self.num_releases = 0  # how often pages were let go of: unchanged means that no more are to be had than before
        self._unreserved = num_pages  # free pages that nobody hopes for
        self._cursor = 0  # where the search for single pages goes on

    def allocate(self, owner: int, count: int, after: int = -1, expect: int = 0) -> IntArray | None:
        """Take `count` pages, held once, or None and no change if fewer are free.

        owner: who hopes to grow (a non-negative integer). after: the owner's last page, -1 for a new run, which then
        reserves `expect` pages softly.
        """
        if count > self.num_free:
            return None
        if after < 0:
            pages = self._start(owner, count, expect)
        else:
            stop = after + 1 + count
            run = self.refs[after + 1:stop]
            if run.shape[0] == count and not run.any():
                pages = np.arange(after + 1, stop, dtype=np.int32)
            else:
                pages = self._scattered(count)
        self._take(pages)
        return pages

    def extend(self, after: IntArray) -> IntArray | None:
        """One page for each of n runs whose last pages are after [n], the next one where it is free; None if fewer are free."""
        count = len(after)
        if count > self.num_free:
            return None
        pages = after + 1
        fits = pages < self.num_pages
        fits[fits] = self.refs[pages[fits]] == 0
        if len(set(pages.tolist())) < count:  # two runs may end in one shared page
            first = np.zeros(count, bool)
            first[np.unique(pages, return_index=True)[1]] = True
            fits &= first
        self._take(pages[fits])
        if not fits.all():
            others = self._scattered(count - int(fits.sum()))
            self._take(others)
            pages[~fits] = others
        return pages

    def share(self, pages: IntArray) -> None:
        """Hold pages once more. Raises ValueError for a free one."""
        if not self.refs[pages].all():
            raise ValueError("a free page can not be shared")
        self.refs[pages] += 1

    def free(self, pages: IntArray, owner: int = _NOBODY) -> None:
        """Let go of pages; those that nobody else holds are free. `owner` hopes for none any more.

        Raises ValueError for a page that nobody holds.
        """
        left = self.refs[pages] - 1
        if (left < 0).any():
            raise ValueError(f"owner {owner} frees pages that nobody holds")
        self.refs[pages] = left
        self.num_releases += 1
        freed = pages[left == 0]
        self.num_free += len(freed)
        self._unreserved += int((self._soft[freed] == _NOBODY).sum())
        for hoped in self._hopes.pop(owner, ()):
            own = self._soft[hoped] == owner
            self._unreserved += int((self.refs[hoped][own] == 0).sum())
            self._soft[hoped][own] = _NOBODY

    def _take(self, pages: IntArray) -> None:
        self._unreserved -= int((self._soft[pages] == _NOBODY).sum())
        self.refs[pages] = 1
        self.num_free -= len(pages)

    def _start(self, owner: int, count: int, expect: int) -> IntArray:
        free = self.refs == 0
        for mask in (free & (self._soft == _NOBODY), free):
            start, length = _largest_gap(mask)
            if length >= count:
                if expect > count:
                    hoped = slice(start, start + min(expect, length))
                    self._unreserved -= int((self._soft[hoped] == _NOBODY).sum())
                    self._soft[hoped] = owner
                    self._hopes.setdefault(owner, []).append(hoped)
                return np.arange(start, start + count, dtype=np.int32)
        return self._scattered(count)

    def _scattered(self, count: int) -> IntArray:
        """Single pages from the cursor on, those that nobody reserved first; a window at a time, as pools are large."""
        found: list[IntArray] = []
        for polite in (True, False):
            if polite and not self._unreserved:
                continue
            for window in range(-(-self.num_pages // _WINDOW)):
                low = (self._cursor // _WINDOW + window) * _WINDOW % (-(-self.num_pages // _WINDOW) * _WINDOW)
                free = self.refs[low:low + _WINDOW] == 0
                soft = self._soft[low:low + _WINDOW]
                free &= (soft == _NOBODY) if polite else (soft != _NOBODY)
                pages = (np.flatnonzero(free)[:count] + low).astype(np.int32)
                count -= len(pages)
                found.append(pages)
                if not count:
                    self._cursor = low
                    return np.concatenate(found)
        raise RuntimeError("fewer pages are free than counted")


def _largest_gap(mask: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """(start, length) of the longest run of True; length 0 where there is none."""
    edges = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    bounds = np.concatenate(([0][:mask[:1].sum()], edges, [len(mask)][:mask[-1:].sum()])).astype(np.int64)
    starts, stops = bounds[::2], bounds[1::2]
    if not len(starts):
        return 0, 0
    best = int(np.argmax(stops - starts))
    return int(starts[best]), int(stops[best] - starts[best])
