"""K and V of a draft head for all requests, in blocks of a pool that grows as they do.

A request's entries begin where the target's features began to be seen: the first position, or the first that was
computed where a prefix came from a cache.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BLOCK = 64


class HeadCache:
    """slots, max_len: most requests and longest sequence. `first` [slots]: position that a slot's entries begin with."""

    def __init__(self, slots: int, max_len: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.empty(2, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.first = np.zeros(slots, np.int64)
        self._blocks = np.zeros((slots, -(-max_len // _BLOCK)), np.int64)
        self._held = np.zeros(slots, np.int64)
        self._free: list[int] = []

    def hold(self, slot: int, end: int) -> None:
        """Room for positions from the slot's first up to `end`, which is left out."""
        have, want = int(self._held[slot]), -(-(end - int(self.first[slot])) // _BLOCK)
        if want <= have:
            return
        if want - have > len(self._free):
            old = self.data.shape[2] // _BLOCK
            more = max(want - have - len(self._free), old // 2)
            self.data = torch.cat((self.data, self.data.new_zeros(*self.data.shape[:2], more * _BLOCK, self.data.shape[3])), 2)
            self._free += range(old + more - 1, old - 1, -1)
        self._blocks[slot, have:want] = [self._free.pop() for _ in range(want - have)]
        self._held[slot] = want

    def release(self, slot: int) -> None:
        """Give a slot's blocks back."""
        self._free += self._blocks[slot, :self._held[slot]].tolist()
        self._held[slot] = self.first[slot] = 0

    def entries(self, slots: np.ndarray, positions: np.ndarray) -> Tensor:
        """Entries int64 of held positions, of the shape that slots and positions have together."""
        block, offset = np.divmod(positions - self.first[slots], _BLOCK)
        return torch.from_numpy(self._blocks[slots, block] * _BLOCK + offset).to(self.data.device)

    def write(self, entries: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [N, KV heads, D] at entries [N]; a broken request's NaN must not reach who gets its blocks next."""
        self.data[:, :, entries] = torch.stack((k, v)).transpose(1, 2).nan_to_num()

    def read(self, slots: np.ndarray, width: int) -> Tensor:
        """K and V [2, n, KV heads, width, D] of the first `width` entries of slots [n]; beyond what is held, any numbers."""
        offsets = np.arange(width)
        held = np.maximum(self._held[slots] * _BLOCK, 1)[:, None]
        index = self.entries(slots[:, None], self.first[slots][:, None] + np.minimum(offsets, held - 1))
        return self.data[:, :, index].transpose(1, 2)
