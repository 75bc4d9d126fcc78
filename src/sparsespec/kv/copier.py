"""How pages get from one pool to the other, as far as it concerns those who decide: no torch."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from sparsespec.kv.allocator import IntArray


class CopyError(Exception):
    """A copy failed outright. Its target pages hold nothing of use; its source is as it was."""


class Side(Enum):
    """The two pools."""

    DEVICE = "device"
    HOST = "host"


class Copier(Protocol):
    """Copies whole pages between the pools, perhaps later than asked.

    Until `done` says so, the source pages must keep their contents and the target pages must not be used: whoever
    starts a copy holds both until then.
    """

    def copy(self, src: Side, dst: Side, src_pages: IntArray, dst_pages: IntArray) -> Any:
        """Start to copy src_pages [n] of one pool to dst_pages [n] of the other; gives a handle. Raises CopyError."""
        ...

    def done(self, handle: Any) -> bool:
        """Whether it has ended; asked once an iteration. Raises CopyError if it failed. No question follows either."""
        ...


class NoCopies:
    """The copier of an engine without a host pool."""

    def copy(self, src: Side, dst: Side, src_pages: IntArray, dst_pages: IntArray) -> Any:
        raise CopyError("there is no host pool")

    def done(self, handle: Any) -> bool:
        raise CopyError("there is no host pool")
