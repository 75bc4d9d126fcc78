"""The integrity check of a KV pool: every page is held exactly as often as somebody answers for it, and free + used = total.

A page whose copy is under way is answered for by that copy, so a page that is reused before its copy ends shows up as
held twice. The cost is a few array operations over the pool: it runs whenever the engine is idle, and in tests after
every step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sparsespec.kv.allocator import IntArray, PageAllocator


def check_pool(name: str, allocator: PageAllocator, holders: Mapping[str, IntArray]) -> None:
    """Raise RuntimeError unless the allocator's counts are what the holders answer for.

    holders: who → every page it holds, as often as it holds it.
    """
    total = allocator.num_pages
    free = int((allocator.refs == 0).sum())
    if free != allocator.num_free:
        raise RuntimeError(f"{name} pool: {free} pages are free, the counter says {allocator.num_free}")
    if (allocator.refs < 0).any():
        raise RuntimeError(f"{name} pool: pages are held less than never")
    counts = {who: np.bincount(pages, minlength=total) for who, pages in holders.items()}
    held = sum(counts.values(), np.zeros(total, np.int64))
    wrong = np.flatnonzero(held != allocator.refs)
    if len(wrong):
        page = int(np.argmax(held - allocator.refs))  # held too often is the worse of the two
        who = ", ".join(f"{w} {int(c[page])}" for w, c in counts.items() if c[page]) or "nobody"
        raise RuntimeError(f"{name} pool: {len(wrong)} pages are not held as often as counted; page {page}: counted "
                           f"{int(allocator.refs[page])}, held by {who}")
