"""What gives way when the device pool is full: `kv_policy`.

- offload: admit as soon as the prompt fits, and swap whole requests to the host, first in, first out: the one that has
  been on the device longest goes, the one that has been away longest returns. Turns are thus equal and nobody starves; the
  longest resident has the most KV, so that one copy makes room for many iterations, and no request is copied twice before
  every other resident was once. Where the host has no room, as recompute.
- recompute: admit the same way; the youngest gives up its KV and computes it again later, so that the oldest always ends.
- reserve: admit only where the longest possible output fits: nothing ever gives way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sparsespec.core.request import Request
from sparsespec.scheduler.memory import Memory


class Running(Protocol):
    """What a policy sees of the scheduler. active [slots]: the request runs; order [slots]: grows with each arrival on the
    device; movable [n]: slots whose requests run and may leave now, to be asked for only if somebody has to."""

    memory: Memory
    active: npt.NDArray[np.bool_]
    order: npt.NDArray[np.int64]

    def movable(self) -> npt.NDArray[np.int64]: ...

    def swap(self, slot: int) -> bool: ...

    def recompute(self, slot: int) -> None: ...


class KVPolicy(ABC):
    """See the module."""

    def first_tokens(self, request: Request) -> int:
        """Tokens that a request holds pages for when it is admitted."""
        return min(request.num_tokens + 1, request.limit)

    def ahead(self, s: Running) -> None:
        """Before an iteration is planned: make the room that it is about to need. Most policies wait until it is needed."""
        return

    def displace(self, s: Running, slot: int) -> None:
        """Take one request off the device."""
        s.recompute(slot)

    @abstractmethod
    def relieve(self, s: Running, count: int) -> bool:
        """Make room for `count` pages. True: somebody left, so plan again; False: the room will come by itself."""


class Recompute(KVPolicy):
    def relieve(self, s: Running, count: int) -> bool:
        """The youngest leaves."""
        slots = s.movable()
        if not len(slots) or (len(slots) == 1 and len(s.memory.transfers)):
            return False
        s.recompute(int(slots[np.argmax(s.order[slots])]))
        return True


class Reserve(Recompute):
    def first_tokens(self, request: Request) -> int:
        return request.limit


class Offload(Recompute):
    def ahead(self, s: Running) -> None:
        """Copies that take several iterations have to begin as many before their pages are needed."""
        memory = s.memory
        lead = memory.transfers.lead
        if lead < 1:
            return
        wanted = int(np.count_nonzero(s.active) * lead) // memory.pages.page_size + 1  # a request grows by about a row an iteration
        if memory.pages.allocator.num_free < wanted and memory.num_free < wanted:
            self._swap(s, wanted)

    def displace(self, s: Running, slot: int) -> None:
        if not s.swap(slot):
            s.recompute(slot)

    def relieve(self, s: Running, count: int) -> bool:
        if self._swap(s, count):
            return True
        if len(s.memory.transfers):
            return False
        return super().relieve(s, count)

    def _swap(self, s: Running, count: int) -> bool:
        """Send the longest resident away until `count` pages are free or on their way to be; never the last one."""
        left = False
        while s.memory.num_free + s.memory.transfers.leaving < count:
            slots = s.movable()
            if len(slots) < 2 or not s.swap(int(slots[np.argmin(s.order[slots])])):
                break
            left = True
        return left


def make_kv_policy(name: str, *, host: bool) -> KVPolicy:
    """The policy of a configuration; without a host pool offload is recompute."""
    if name == "reserve":
        return Reserve()
    return Offload() if name == "offload" and host else Recompute()
