"""Copies between the pools that are under way.

A copy holds its pages on both sides, beside whoever else does, from its start until the copier says that it has ended.
So nobody has to wait before letting go of pages: a request can be aborted, finished or moved on at any time, and no page
is given to anybody else while a copy reads or writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsespec.kv.allocator import NO_PAGES, IntArray, PageAllocator
from sparsespec.kv.copier import Copier, CopyError, Side

_FORGET = 0.9  # how fast the longest copy seen is forgotten, a copy


@dataclass(eq=False)
class _Transfer:
    src: Side
    device: IntArray
    host: IntArray
    on_end: Callable[[bool], None]
    started: int
    handle: Any = None
    error: CopyError | None = None


class Transfers:
    """See the module. lead: iterations that a copy takes, at most, of late."""

    def __init__(self, device: PageAllocator, host: PageAllocator, copier: Copier) -> None:
        self.copier = copier
        self._allocators = {Side.DEVICE: device, Side.HOST: host}
        self._pending: list[_Transfer] = []
        self._now = 0
        self.lead = 0.0
        self.num_failed = 0
        self.last_error: CopyError | None = None

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def leaving(self) -> int:
        """Device pages that copies to the host will let go of."""
        return sum(len(t.device) for t in self._pending if t.src is Side.DEVICE)

    def start(self, src: Side, device: IntArray, host: IntArray, on_end: Callable[[bool], None]) -> None:
        """Copy pages [n] away from `src`; `on_end(whether it worked)` is called when it has ended, perhaps at once."""
        t = _Transfer(src, device.copy(), host.copy(), on_end, self._now)
        self._allocators[Side.DEVICE].share(t.device)
        self._allocators[Side.HOST].share(t.host)
        try:
            if src is Side.DEVICE:
                t.handle = self.copier.copy(Side.DEVICE, Side.HOST, t.device, t.host)
            else:
                t.handle = self.copier.copy(Side.HOST, Side.DEVICE, t.host, t.device)
        except CopyError as error:
            t.error = error
        if not self._ended(t):
            self._pending.append(t)

    def poll(self) -> None:
        """Ask after every copy; once an iteration."""
        self._now += 1
        if self._pending:
            pending, self._pending = self._pending, []
            self._pending = [t for t in pending if not self._ended(t)] + self._pending

    def _ended(self, t: _Transfer) -> bool:
        if t.error is None:
            try:
                if not self.copier.done(t.handle):
                    return False
            except CopyError as error:
                t.error = error
        self._allocators[Side.DEVICE].free(t.device)
        self._allocators[Side.HOST].free(t.host)
        self.lead = max(float(self._now - t.started), self.lead * _FORGET)
        if t.error is not None:
            self.num_failed, self.last_error = self.num_failed + 1, t.error
        t.on_end(t.error is None)
        return True

    def pages(self, side: Side) -> IntArray:
        """Every page that a copy holds on one side."""
        held = [t.device if side is Side.DEVICE else t.host for t in self._pending]
        return np.concatenate(held) if held else NO_PAGES
