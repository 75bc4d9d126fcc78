"""Moves pages between the device pool and the host pool: at once on a CPU, on a stream of its own on a GPU.

Both work in chunks, so that what is in flight between the two layouts stays small however long a request is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsespec.kv.allocator import IntArray
from sparsespec.kv.copier import Copier, CopyError, NoCopies, Side
from sparsespec.kv.host_pool import HostPool
from sparsespec.kv.pool import KVPool

_CHUNK_BYTES = 32 << 20


def make_copier(device: KVPool, host: HostPool | None, page_size: int) -> Copier:
    """The copier for where the pool lies."""
    if host is None:
        return NoCopies()
    return (StreamCopier if device.device.type == "cuda" else SyncCopier)(device, host, page_size)


class _Pages:
    """The two pools as pages, and how a list of pages is cut into chunks."""

    def __init__(self, device: KVPool, host: HostPool, page_size: int) -> None:
        self.pool, self.host, self.page_size = device, host.data, page_size
        page_bytes = host.data[0].numel() * host.data.element_size()
        self.chunk = max(1, min(_CHUNK_BYTES // page_bytes, host.num_pages))

    @property
    def device(self) -> Tensor:
        """[pages, planes, elements], as the host has them; looked up each time, as the pool may have slept."""
        return self.pool.planes(self.page_size).transpose(0, 1)

    def chunks(self, src: IntArray, dst: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """Pieces of two page lists."""
        for low in range(0, len(src), self.chunk):
            yield src[low:low + self.chunk], dst[low:low + self.chunk]


class SyncCopier(_Pages):
    """Copies before it returns."""

    def copy(self, src: Side, dst: Side, src_pages: IntArray, dst_pages: IntArray) -> Any:
        """See Copier."""
        device = self.device
        try:
            for a, b in self.chunks(src_pages, dst_pages):
                source, target = torch.from_numpy(a.astype(np.int64)), torch.from_numpy(b.astype(np.int64))
                if src is Side.DEVICE:
                    self.host.index_copy_(0, target, device.index_select(0, source))
                else:
                    device.index_copy_(0, target, self.host.index_select(0, source))
        except RuntimeError as e:
            raise CopyError(str(e)) from e
        return None

    def done(self, handle: Any) -> bool:
        """See Copier."""
        return True


class StreamCopier(_Pages):
    """Copies on a CUDA stream of its own, after what the compute stream was given before, and says when it has ended.

    A chunk goes through a staging buffer on the device, where one kernel gathers a page from its many planes into one piece,
    or scatters it; the stream keeps the chunks' order, so one buffer does.
    """

    def __init__(self, device: KVPool, host: HostPool, page_size: int) -> None:
        super().__init__(device, host, page_size)
        self.stream = torch.cuda.Stream(device.device)
        self._staging = torch.empty(self.chunk, *host.data.shape[1:], dtype=device.dtype, device=device.device)

    def copy(self, src: Side, dst: Side, src_pages: IntArray, dst_pages: IntArray) -> Any:
        """See Copier."""
        device = self.device
        on_device = src_pages if src is Side.DEVICE else dst_pages
        index = torch.from_numpy(on_device.astype(np.int64)).to(device.device)
        try:
            self.stream.wait_stream(torch.cuda.current_stream(device.device))
            with torch.cuda.stream(self.stream):
                low = 0
                for a, b in self.chunks(src_pages, dst_pages):
                    part = index[low:low + len(a)]
                    low += len(a)
                    if src is Side.DEVICE:
                        self._out(device, part, b)
                    else:
                        self._in(device, part, a)
                event = torch.cuda.Event()
                event.record(self.stream)
        except RuntimeError as e:
            raise CopyError(str(e)) from e
        return event, index  # the stream reads the index until then

    def done(self, handle: Any) -> bool:
        """See Copier."""
        try:
            ended: bool = handle[0].query()
        except RuntimeError as e:
            raise CopyError(str(e)) from e
        return ended

    def _out(self, device: Tensor, index: Tensor, host_pages: IntArray) -> None:
        torch.index_select(device, 0, index, out=self._staging[:len(host_pages)])
        for low, high in _runs(host_pages):
            first = int(host_pages[low])
            self.host[first:first + high - low].copy_(self._staging[low:high], non_blocking=True)

    def _in(self, device: Tensor, index: Tensor, host_pages: IntArray) -> None:
        for low, high in _runs(host_pages):
            first = int(host_pages[low])
            self._staging[low:high].copy_(self.host[first:first + high - low], non_blocking=True)
        device.index_copy_(0, index, self._staging[:len(host_pages)])


def _runs(pages: IntArray) -> Iterator[tuple[int, int]]:
    """(first, end) of runs of neighbouring pages in a list."""
    edges = np.flatnonzero(np.diff(pages) != 1) + 1
    bounds = [0, *edges.tolist(), len(pages)]
    return pairwise(bounds)
