"""Requests that gave up their place on the device: their KV waits on the host (SparseSpec, the KV manager).

Only pages move. A swapped request keeps its slot, and with it its token row, its selected indices and its drafting state,
which therefore go on exactly where they were; as nobody new starts while anybody is swapped, no one misses the slot. Draft
KV is scratch and stays behind: only committed KV is copied. A request comes back whole: all its pages are reserved before
the copy starts, so that two of them can never wait for each other with half the pool each.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from sparsespec.kv.allocator import NO_PAGES, IntArray, PageAllocator
from sparsespec.kv.copier import Side
from sparsespec.kv.table import PageTable
from sparsespec.scheduler.transfers import Transfers


@dataclass(eq=False)
class Swapped:
    """A request that is away. tokens: its committed KV; length: tokens to reserve pages for when it returns; expect: its
    limit. ready: its copy to the host has ended. host: pages there."""

    slot: int
    tokens: int
    length: int
    expect: int
    host: IntArray
    ready: bool = False


class Swapper:
    """See the module. `ended`: (slot, tokens) of requests that came back or, with -1 tokens, lost their KV, until taken."""

    def __init__(self, pages: PageTable, host: PageAllocator, transfers: Transfers) -> None:
        self._pages, self._host, self._transfers = pages, host, transfers
        self.queue: deque[Swapped] = deque()  # FIFO; the head returns first
        self._returning: dict[int, Swapped] = {}
        self.ended: list[tuple[int, int]] = []
        self._freed = 0
        self.offloaded_tokens = 0
        self.restored_tokens = 0

    def __len__(self) -> int:
        return len(self.queue) + len(self._returning)

    def out(self, slot: int, tokens: int, length: int, expect: int) -> bool:
        """Begin to move a slot's committed KV to the host; False and no change if the host lacks pages.

        The slot holds no pages from now on; the copy does, until it has ended.
        """
        count = -(-tokens // self._pages.page_size)
        host = self._host.allocate(slot, count)
        if host is None:
            return False
        record = Swapped(slot, tokens, length, expect, host)
        self.queue.append(record)
        held = self._pages.detach(slot)
        leaving = len(held)

        def ended(worked: bool) -> None:
            self._freed += leaving
            if record in self.queue:  # else it was aborted meanwhile
                record.ready = worked
                if worked:
                    self.offloaded_tokens += tokens
                else:
                    self._lose(record)

        if count:
            self._transfers.start(Side.DEVICE, held[:count], host, ended)
        else:
            ended(True)
        self._pages.allocator.free(held, slot)
        return True

    def back(self, record: Swapped) -> None:
        """Begin to bring the head of the queue back. Its pages must be free: RuntimeError else."""
        self.queue.remove(record)
        if not self._pages.grow(record.slot, record.length, record.expect):
            raise RuntimeError("a swapped request returns without room")
        self._returning[record.slot] = record

        def ended(worked: bool) -> None:
            if self._returning.get(record.slot) is record:
                del self._returning[record.slot]
                self._host.free(record.host)
                self.restored_tokens += record.tokens * worked
                self.ended.append((record.slot, record.tokens if worked else -1))

        if len(record.host):
            self._transfers.start(Side.HOST, self._pages.held(record.slot)[:len(record.host)], record.host, ended)
        else:
            ended(True)

    def forget(self, slot: int) -> None:
        """The slot's request is gone: let go of what the host holds of it. What is under way ends by itself."""
        record = self._returning.pop(slot, None) or next((r for r in self.queue if r.slot == slot), None)
        self.ended = [e for e in self.ended if e[0] != slot]
        if record is not None:
            if record in self.queue:
                self.queue.remove(record)
            self._host.free(record.host)

    def take_freed(self) -> int:
        """Device pages that copies to the host gave back since the last time."""
        freed, self._freed = self._freed, 0
        return freed

    def _lose(self, record: Swapped) -> None:
        self.queue.remove(record)
        self._host.free(record.host)
        self.ended.append((record.slot, -1))

    def host_pages(self) -> IntArray:
        """Every host page that a swapped request holds."""
        held = [r.host for r in (*self.queue, *self._returning.values())]
        return np.concatenate(held) if held else NO_PAGES
