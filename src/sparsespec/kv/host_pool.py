"""The host memory that holds KV pages which had to leave the device.

Page-major, [pages, planes, elements]: a page is one piece, so that a copy over PCIe is a few long transfers. On a GPU the
memory is pinned by registering one plain allocation: PyTorch's own pinned allocator rounds a size up to a power of two,
which would take up to twice what was asked. All of it is touched at the start, so that memory that is not there shows
then and not in the middle of a run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsespec.core.errors import InvalidValueError
from sparsespec.kv.pool import KVPool

_GIB = 1 << 30
_TOUCHED = 1 << 28  # bytes that are filled at a time


class HostPool:
    """`gib` GiB of pages as `device` has them, never more than asked. `data` [pages, planes, page_size · head_dim].

    Raises InvalidValueError if that is less than a page or more than the host has.
    """

    def __init__(self, gib: float, device: KVPool, page_size: int) -> None:
        planes = device.planes(page_size)
        shape = (planes.shape[0], planes.shape[2])
        page_bytes = shape[0] * shape[1] * device.data.element_size()
        self.num_pages = int(gib * _GIB) // page_bytes
        if not self.num_pages:
            raise InvalidValueError("kv_offloading_size", gib, f"less than one page of {page_bytes} bytes",
                                    f"Give at least {page_bytes / _GIB:.2g}, or leave it out")
        try:
            self.data = allocate_host(self.num_pages * page_bytes).view(device.dtype).view(self.num_pages, *shape)
            self._pinned = device.device.type == "cuda"
            if self._pinned:
                pin(self.data)
        except (RuntimeError, MemoryError) as e:
            raise InvalidValueError("kv_offloading_size", gib, f"the host has no such memory ({str(e).splitlines()[0]})",
                                    "Lower it, or leave it out: requests then compute their KV again") from e

    def close(self) -> None:
        """Unpin the memory, which PyTorch then frees."""
        if self._pinned:
            self._pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())


def allocate_host(size: int) -> Tensor:
    """`size` bytes of host memory, touched. Raises RuntimeError or MemoryError."""
    data = torch.empty(size, dtype=torch.uint8)
    for low in range(0, size, _TOUCHED):
        data[low:low + _TOUCHED].fill_(0)
    return data


def pin(data: Tensor) -> None:
    """Lock memory for copies by the device. Raises RuntimeError."""
    error = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel() * data.element_size(), 0)
    if int(error):
        raise RuntimeError(f"cudaHostRegister failed: {error}")
