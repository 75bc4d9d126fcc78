"""Which pages hold which request: one row of page numbers a slot."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sparsespec.kv.allocator import PageAllocator


class PageTable:
    """pages [slots, max_pages] int32 in sequence order; counts [slots] how many are held. Tokens p lies in page p // page_size."""

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
        """Hold pages for `length` tokens; False and no change if the pool lacks them. `expect`: the length it may reach."""
        have = int(self.counts[slot])
        want = -(-length // self.page_size)
        if want <= have:
            return True
        after = int(self.pages[slot, have - 1]) if have else -1
        got = self.allocator.allocate(slot, want - have, after, -(-expect // self.page_size))
        if got is None:
            return False
        self.pages[slot, have:want] = got
        self.counts[slot] = want
        return True

    def release(self, slot: int) -> None:
        """Give all pages of a slot back."""
        count = int(self.counts[slot])
        if count:
            self.allocator.free(slot, self.pages[slot, :count])
        self.counts[slot] = 0

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

    def check(self) -> None:
        """Integrity: every page is held by exactly the slot that owns it. Raises RuntimeError."""
        self.allocator.check()
        for slot in np.flatnonzero(self.counts):
            held = self.pages[slot, :self.counts[slot]]
            if not (self.allocator.owner[held] == slot).all() or len(np.unique(held)) != len(held):
                raise RuntimeError(f"slot {slot} holds a page twice or one that it does not own")
        if int(self.counts.sum()) != self.allocator.num_pages - self.allocator.num_free:
            raise RuntimeError("pages are owned that no slot holds")
