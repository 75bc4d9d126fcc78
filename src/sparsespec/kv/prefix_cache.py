"""The prefix cache: which pages hold the KV of which beginning of a text.

A full page is known by a digest of its tokens chained to the digest of the page before it, so that equal digests mean
equal texts from the first token on. The chain begins with the request's `cache_salt`: callers with different salts never meet.
Only committed KV may be inserted. The cache holds each of its pages once, like any other holder; a page that nobody else
holds may be evicted, the least recently used first. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from sparsespec.kv.allocator import NO_PAGES, IntArray, PageAllocator

Digest = bytes
_SIZE = 16  # bytes: by accident two texts never meet, and on purpose only at the cost of 2**64 hashes


def extend_chain(chain: list[Digest], salt: str | None, tokens: Sequence[int], page_size: int, pages: int) -> None:
    """Append to `chain` until it has a digest for each of the first `pages` full pages of `tokens`."""
    have = len(chain)
    if pages <= have:
        return
    data = np.asarray(tokens[have * page_size:pages * page_size], np.int64).tobytes()
    width, last = 8 * page_size, chain[-1] if chain else repr(salt).encode()
    for low in range(0, (pages - have) * width, width):
        last = hashlib.blake2b(last + data[low:low + width], digest_size=_SIZE).digest()
        chain.append(last)


class PrefixCache:
    """See the module. One for each pool that keeps prefixes."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._page_of: dict[Digest, int] = {}
        self._digest_of: dict[int, Digest] = {}
        self._used = np.full(allocator.num_pages, -1, np.int64)  # by page: when it was last used; -1: not cached
        self._clock = 0

    def __len__(self) -> int:
        return len(self._page_of)

    @property
    def pages(self) -> IntArray:
        """The pages that the cache holds."""
        return np.flatnonzero(self._used >= 0).astype(np.int32)

    @property
    def num_evictable(self) -> int:
        """Pages that nobody else holds."""
        return int(((self._used >= 0) & (self._allocator.refs == 1)).sum())

    def match(self, chain: Sequence[Digest]) -> IntArray:
        """Pages of the longest cached beginning of a chain; they count as used now. The caller has to share them to keep them."""
        found = []
        for digest in chain:
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        if not found:
            return NO_PAGES
        pages = np.asarray(found, np.int32)
        self._touch(pages)
        return pages

    def insert(self, chain: Sequence[Digest], pages: IntArray) -> None:
        """Cache pages [n] of committed KV under a chain [n]. What is there already stays: its twin is not cached."""
        fresh = [i for i, digest in enumerate(chain) if digest not in self._page_of]
        new = pages[fresh]
        self._allocator.share(new)
        for i, page in zip(fresh, new.tolist(), strict=True):
            self._page_of[chain[i]] = page
            self._digest_of[page] = chain[i]
        self._touch(np.asarray([self._page_of[digest] for digest in chain], np.int32))

    def oldest(self, count: int) -> IntArray:
        """Up to `count` pages that nobody else holds, least recently used first."""
        idle = np.flatnonzero((self._used >= 0) & (self._allocator.refs == 1))
        if count < len(idle):
            idle = idle[np.argpartition(self._used[idle], count)[:count]]
        return idle[np.argsort(self._used[idle])].astype(np.int32)

    def digests(self, pages: IntArray) -> list[Digest]:
        """The digests of cached pages."""
        return [self._digest_of[page] for page in pages.tolist()]

    def knows(self, digest: Digest) -> bool:
        """Whether a page is cached under this digest."""
        return digest in self._page_of

    def drop(self, pages: Iterable[int]) -> None:
        """Let go of cached pages; whoever else holds one keeps it."""
        gone = np.fromiter(pages, np.int32)
        if not len(gone):
            return
        for page in gone.tolist():
            del self._page_of[self._digest_of.pop(page)]
        self._used[gone] = -1
        self._allocator.free(gone)

    def drop_idle(self, digests: Iterable[Digest]) -> None:
        """Let go of those of these pages that are cached and that nobody else holds."""
        pages = (self._page_of.get(digest, -1) for digest in digests)
        self.drop([page for page in pages if page >= 0 and self._allocator.refs[page] == 1])

    def evict(self, count: int) -> int:
        """Free up to `count` pages that nobody else holds; gives how many."""
        pages = self.oldest(count) if count > 0 else NO_PAGES
        self.drop(pages.tolist())
        return len(pages)

    def clear(self) -> None:
        """Forget everything."""
        self.drop(self.pages.tolist())

    def _touch(self, pages: IntArray) -> None:
        """A page's beginning counts as used after it, so that it never goes before it."""
        count = len(pages)
        self._clock += count
        self._used[pages] = np.arange(self._clock, self._clock - count, -1)
