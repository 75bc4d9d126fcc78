"""Which pages hold which request: one row of page numbers a slot."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sparsespec.kv.allocator import NO_PAGES, IntArray, PageAllocator


class PageTable:
    """pages [slots, max_pages] int32 in sequence order; counts [slots] how many are held. Token p lies in page p // page_size."""

    def __init__(self, slots: int, max_len: int, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.pages = np.zeros((slots, -(-max_len // page_size)), np.int32)
        self.counts = np.zeros(slots, np.int32)

    @property
    def capacity(self) -> int:
        """Tokens that the pool holds."""
        return self.allocator.num_pages * self.page_size

    def needed(self, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Pages that sequences of these lengths take."""
        return -(-lengths // self.page_size)

    def grow(self, slot: int, length: int, expect: int = 0) -> bool:
        """Hold pages for `length` tokens; False and no change if the pool lacks them.

        expect: the length it may reach, given for a request that begins; its pages then start a new run.
        """
        have = int(self.counts[slot])
        want = -(-length // self.page_size)
        if want <= have:
            return True
        after = int(self.pages[slot, have - 1]) if have and not expect else -1
        got = self.allocator.allocate(slot, want - have, after, -(-expect // self.page_size) - have)
        if got is None:
            return False
        self.pages[slot, have:want] = got
        self.counts[slot] = want
        return True

    def grow_all(self, slots: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> bool:
        """`grow` for distinct slots [n] to lengths [n], all or none of them; most steps add one page to a few slots."""
        missing = self.needed(lengths) - self.counts[slots]
        index = np.flatnonzero(missing > 0)
        if not len(index):
            return True
        if int(missing[index].sum()) > self.allocator.num_free:
            return False
        one = index[(missing[index] == 1) & (self.counts[slots[index]] > 0)]
        if len(one):
            grown = slots[one]
            count = self.counts[grown]
            pages = self.allocator.extend(self.pages[grown, count - 1])
            if pages is None:
                raise RuntimeError("fewer pages are free than counted")
            self.pages[grown, count] = pages
            self.counts[grown] += 1
        if len(one) < len(index):
            for i in index:
                self.grow(int(slots[i]), int(lengths[i]))
        return True

    def adopt(self, slot: int, pages: IntArray) -> None:
        """Append pages that the caller holds: they are the slot's from now on."""
        have = int(self.counts[slot])
        self.pages[slot, have:have + len(pages)] = pages
        self.counts[slot] = have + len(pages)

    def detach(self, slot: int) -> IntArray:
        """Hand the slot's pages to the caller, who holds them from now on."""
        pages: IntArray = self.pages[slot, :self.counts[slot]].copy()
        self.counts[slot] = 0
        return pages

    def held(self, slot: int) -> IntArray:
        """The pages of a slot in sequence order; a view."""
        return self.pages[slot, :self.counts[slot]]

    def all_held(self) -> IntArray:
        """The pages of all slots, one after the other: what the slots answer for in the integrity check."""
        rows = [self.held(int(slot)) for slot in np.flatnonzero(self.counts)]
        return np.concatenate(rows) if rows else NO_PAGES

    def release(self, slot: int) -> None:
        """Give all pages of a slot back."""
        self.allocator.free(self.detach(slot), slot)

    def positions_to_entries(self, slot: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Physical entries [n] in the pool of a slot's token positions [n]."""
        page, offset = np.divmod(positions, self.page_size)
        return self.pages[slot, page].astype(np.int64) * self.page_size + offset

    def runs(self, slot: int, length: int) -> list[tuple[int, int]]:
        """The first `length` tokens of a slot as (first entry, count) runs of neighbouring entries."""
        count = -(-length // self.page_size)
        pages = self.pages[slot, :count]
        breaks = np.flatnonzero(np.diff(pages) != 1) + 1
        bounds = [0, *breaks.tolist(), count]
        size = self.page_size
        return [(int(pages[a]) * size, min(b * size, length) - a * size) for a, b in pairwise(bounds)]
