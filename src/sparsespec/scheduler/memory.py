"""The KV memory as the scheduler sees it: pages for those who run, room on the host for those who can not, shared prefixes.

Everything that holds pages is here or below: slots (the page table), copies under way, swapped requests and the prefix
caches. What gives way when the device pool is full is decided elsewhere (kv_policy.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparsespec.core.request import Request
from sparsespec.kv.allocator import PageAllocator
from sparsespec.kv.copier import Copier, NoCopies, Side
from sparsespec.kv.integrity import check_pool
from sparsespec.kv.table import PageTable
from sparsespec.scheduler.prefixes import Prefixes
from sparsespec.scheduler.swap import Swapper
from sparsespec.scheduler.transfers import Transfers


@dataclass(frozen=True)
class Placement:
    """cached: tokens whose KV was found. loading: a part of it is on its way from the host, and the request waits for it."""

    cached: int
    loading: bool


class Memory:
    """See the module. round_tokens: most tokens that a round adds, drafts included. host_pages: 0 without a host pool."""

    def __init__(self, pages: PageTable, *, host_pages: int = 0, copier: Copier | None = None, prefix_caching: bool = False,
                 round_tokens: int = 1) -> None:
        self.pages, self.round_tokens = pages, round_tokens
        self.host = PageAllocator(host_pages)
        self.transfers = Transfers(pages.allocator, self.host, copier or NoCopies())
        self.swapper = Swapper(pages, self.host, self.transfers)
        self.prefixes = Prefixes(pages, self.host, self.transfers, enabled=prefix_caching)
        self._slack = 0  # free pages that swaps made for the growth of those who stayed
        self._stuck: tuple[object, int] = (None, -1)  # who found no room, and how often pages had been let go of by then

    # -- room ----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Device pages that are free or hold nothing but cached prefixes."""
        return self.pages.allocator.num_free + self.prefixes.device.num_evictable

    @property
    def num_host_free(self) -> int:
        """The same for the host pool."""
        return self.host.num_free + self.prefixes.host.num_evictable

    def secure(self, count: int) -> bool:
        """Whether `count` device pages are free now, if need be by evicting cached prefixes; none is evicted in vain."""
        short = count - self.pages.allocator.num_free
        if short <= 0:
            return True
        if not len(self.prefixes.device) or self.prefixes.device.num_evictable < short:
            return False
        self.prefixes.device.evict(short)
        return True

    def missing(self, slots: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Pages [n] that slots [n] lack to hold `lengths` tokens."""
        return np.maximum(self.pages.needed(lengths) - self.pages.counts[slots], 0)

    def hold(self, slots: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> int:
        """Give distinct slots [n] the pages that they lack to hold `lengths` tokens; gives how many are missing, and then none
        was taken."""
        missing = self.missing(slots, lengths)
        short = np.flatnonzero(missing)
        count = int(missing[short].sum())
        if not self.secure(count):
            return count
        if count:
            if not self.pages.grow_all(slots[short], lengths[short]):
                raise RuntimeError("pages were not secured")
            self._slack = max(0, self._slack + self.swapper.take_freed() - count)
        return 0

    # -- requests ------------------------------------------------------------------------------------------------

    def place(self, slot: int, request: Request, tokens: int) -> Placement | None:
        """Give a new request its first pages, for `tokens` tokens; None and no change if the pool lacks them."""
        if self._is_stuck(request):
            return None
        device, host = self.prefixes.match(request)
        allocator = self.pages.allocator
        allocator.share(device)
        if not self.secure(-(-tokens // self.pages.page_size) - len(device)):
            allocator.free(device)
            self._stick(request)
            return None
        self.pages.adopt(slot, device)
        if not self.pages.grow(slot, tokens, request.limit):
            raise RuntimeError("pages were not secured")
        if len(host):
            self.prefixes.load(slot, len(device), host)
        return Placement(len(device) * self.pages.page_size, bool(len(host)))

    def retire(self, slot: int, request: Request, committed: int) -> None:
        """A request is to leave its slot, on the device, on the host or between the two; `release` follows. `committed` tokens
        of KV may be cached."""
        self.prefixes.forget(slot)
        self.swapper.forget(slot)
        self.prefixes.publish(slot, request, min(committed, int(self.pages.counts[slot]) * self.pages.page_size))

    def release(self, slot: int) -> None:
        """The slot's pages are in use no more."""
        self.pages.release(slot)

    def swap_out(self, slot: int, committed: int, length: int, limit: int) -> bool:
        """Send a request to the host with its `committed` tokens of KV; False and no change if there is no room.

        length: tokens it has; limit: the most it may reach.
        """
        self.prefixes.host.evict(-(-committed // self.pages.page_size) - self.host.num_free)
        return self.host.num_pages > 0 and self.swapper.out(slot, committed, min(length + self.round_tokens, limit), limit)

    def resume(self, *, idle: bool) -> None:
        """Bring back swapped requests while the head of their queue fits.

        Free pages that a swap made are left to the growth of those who stayed: else the one would come back in the moment
        in which the other leaves, and all copies would be for nothing. idle: nobody stayed.
        """
        queue = self.swapper.queue
        if idle or not queue:
            self._slack, self._stuck = 0, (None, -1)
        while queue and queue[0].ready and not self._is_stuck(queue[0]):
            if not self.secure(-(-queue[0].length // self.pages.page_size) + self._slack):
                self._stick(queue[0])
                return
            self.swapper.back(queue[0])

    def poll(self) -> None:
        """Ask after copies; once an iteration."""
        self.transfers.poll()
        self.prefixes.spill()

    def take_ended(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(slot, committed tokens) of requests that came back from the host, -1 for those whose copy failed; and the same of
        those that waited for a prefix, which a failure makes shorter. Each is told once."""
        self._slack += self.swapper.take_freed()
        returned, self.swapper.ended = self.swapper.ended, []
        loaded, self.prefixes.ended = self.prefixes.ended, []
        return returned, loaded

    def _stick(self, who: object) -> None:
        self._stuck = (who, self.pages.allocator.num_releases)

    def _is_stuck(self, who: object) -> bool:
        """Whether it found no room before and no page was let go of since."""
        return self._stuck == (who, self.pages.allocator.num_releases)

    def check(self) -> None:
        """Integrity of both pools. Raises RuntimeError."""
        check_pool("device", self.pages.allocator, {
            "slots": self.pages.all_held(), "prefixes": self.prefixes.device.pages, "copies": self.transfers.pages(Side.DEVICE)})
        check_pool("host", self.host, {
            "swapped requests": self.swapper.host_pages(), "prefixes": self.prefixes.host_pages(),
            "copies": self.transfers.pages(Side.HOST)})
