"""Prefix sharing between requests: what a new one finds computed already, and what one leaves behind.

Two caches, one a pool. What a request has committed is cached on the device when its prompt is done and when it leaves.
Cached pages that nobody uses are free in all but name; those that would be evicted soon go to the host pool, and a
request that finds its prefix there waits for a copy instead of computing it.
"""

from __future__ import annotations

import numpy as np

from sparsespec.core.request import Request
from sparsespec.kv.allocator import NO_PAGES, IntArray, PageAllocator
from sparsespec.kv.copier import Side
from sparsespec.kv.prefix_cache import PrefixCache, extend_chain
from sparsespec.kv.table import PageTable
from sparsespec.scheduler.transfers import Transfers

_SPILL = 64  # pages that one copy to the host carries
_LOW = 1 / 16  # share of the device pool below which free pages are few


class Prefixes:
    """See the module. The last rows of a prompt are computed in any case: their logits and scores are wanted."""

    def __init__(self, pages: PageTable, host: PageAllocator, transfers: Transfers, *, enabled: bool) -> None:
        self._pages, self._host_pages, self._transfers, self.enabled = pages, host, transfers, enabled
        self.device = PrefixCache(pages.allocator)
        self.host = PrefixCache(host)
        self._loading: dict[int, object] = {}
        self._spilling, self._looked = NO_PAGES, -1  # host pages that are being filled; when pages were last let go of
        self._era = 0  # of the caches' contents
        self.ended: list[tuple[int, int]] = []  # (slot, tokens it holds now) of requests that waited for a copy, until taken
        self.spilled_pages = 0

    def match(self, request: Request) -> tuple[IntArray, IntArray]:
        """(pages on the device, pages on the host that continue them) of the request's beginning."""
        count = max(0, request.num_tokens - request.traits.prompt_rows) // self._pages.page_size
        if not self.enabled or not count or request.params.prompt_logprobs is not None:
            return NO_PAGES, NO_PAGES
        self._extend(request, count)
        device = self.device.match(request.chain[:count])
        return device, self.host.match(request.chain[len(device):count]) if len(self.host) else NO_PAGES

    def load(self, slot: int, first: int, host: IntArray) -> None:
        """Copy host pages [n] to the slot's pages from number `first` on; `ended` tells when that is over."""
        token = self._loading[slot] = object()
        size = self._pages.page_size

        def ended(worked: bool) -> None:
            if self._loading.get(slot) is token:  # else it was aborted meanwhile
                del self._loading[slot]
                self.ended.append((slot, (first + len(host) * worked) * size))

        self._transfers.start(Side.HOST, self._pages.held(slot)[first:first + len(host)], host, ended)

    def forget(self, slot: int) -> None:
        """The slot's request is gone."""
        self._loading.pop(slot, None)
        self.ended = [e for e in self.ended if e[0] != slot]

    def publish(self, slot: int, request: Request, tokens: int) -> None:
        """Cache the slot's full pages, of which `tokens` tokens hold committed KV."""
        count = min(tokens, request.num_tokens) // self._pages.page_size
        if self.enabled and count:
            self._extend(request, count)
            self.device.insert(request.chain[:count], self._pages.held(slot)[:count])

    def spill(self) -> None:
        """While few device pages are free, copy those that would be evicted next to the host; once an iteration."""
        device = self._pages.allocator
        if len(self._spilling) or not self._host_pages.num_pages or device.num_free >= device.num_pages * _LOW or (
                device.num_releases == self._looked):
            return
        self._looked = device.num_releases
        pages = self.device.oldest(_SPILL)
        there = [self.host.knows(digest) for digest in self.device.digests(pages)]
        self.device.drop(p for p, known in zip(pages.tolist(), there, strict=True) if known)
        pages = pages[[not known for known in there]]
        self.host.evict(len(pages) - self._host_pages.num_free)
        pages = pages[:self._host_pages.num_free]
        if len(pages):
            self._spill(pages)

    def _spill(self, pages: IntArray) -> None:
        host = self._host_pages.allocate(0, len(pages))
        if host is None:
            raise RuntimeError("fewer host pages are free than counted")
        digests, era = self.device.digests(pages), self._era
        self._spilling = host

        def ended(worked: bool) -> None:
            self._spilling = NO_PAGES
            if worked and era == self._era:
                self.host.insert(digests, host)
                self.spilled_pages += len(host)
                self.device.drop_idle(digests)
            self._host_pages.free(host)

        self._transfers.start(Side.DEVICE, pages, host, ended)

    def reset(self) -> None:
        """Forget every prefix on both pools."""
        self._era += 1
        self.device.clear()
        self.host.clear()

    def host_pages(self) -> IntArray:
        """Every host page that is held here."""
        return np.concatenate((self.host.pages, self._spilling))

    def _extend(self, request: Request, count: int) -> None:
        tokens = request.prompt_token_ids
        if count * self._pages.page_size > len(tokens):
            tokens = tokens + request.output_token_ids
        extend_chain(request.chain, request.cache_salt, tokens, self._pages.page_size, count)
