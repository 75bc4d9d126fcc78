"""Which KV entries each request's drafts may see: kept as positions, which stay true when pages move."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsespec.attention.base import Reselect, SparseRows
from sparsespec.config.model import ModelConfig
from sparsespec.kv.pool import KVPool
from sparsespec.kv.table import PageTable


class SelectionStore:
    """A selection a slot: positions [slots, layers, KV heads, width] int32, of which counts are valid, then the tail.

    The tail is every position from the last verification's first scored row up to the draft itself.
    """

    def __init__(self, slots: int, config: ModelConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self._shape = (slots, config.num_layers, config.num_kv_heads)
        self.positions = torch.zeros(*self._shape, 0, dtype=torch.int32, device=device)
        self.counts = torch.zeros(self._shape, dtype=torch.int32, device=device)
        self.tail = np.zeros(slots, np.int64)
        self.width = np.zeros(slots, np.int64)  # host copy of the widest layer's count
        self.entries = np.zeros(slots, np.int64)  # entries over layers and heads, for the byte counter

    def put(self, slot: int, tail: int, positions: Tensor, counts: Tensor | None = None) -> None:
        """Store positions [layers, KV heads, n] with counts [layers, KV heads] (None: all n are valid)."""
        width = positions.shape[-1]
        self._store(slot, positions, width if counts is None else counts)
        self.tail[slot], self.width[slot] = tail, width
        self.entries[slot] = positions.numel() if counts is None else int(counts.sum())

    def put_none(self, slot: int, tail: int) -> None:
        """Store that drafts see nothing but the tail."""
        self.put(slot, tail, self.positions[slot, :, :, :0])

    def _store(self, slot: int, positions: Tensor, counts: Tensor | int) -> None:
        width = positions.shape[-1]
        if width > self.positions.shape[-1]:
            grown = torch.zeros(*self._shape, max(width, 2 * self.positions.shape[-1]), dtype=torch.int32, device=self.device)
            grown[..., :self.positions.shape[-1]] = self.positions
            self.positions = grown
        self.positions[slot, :, :, :width] = positions
        self.counts[slot] = counts

    def view(self, rows: Tensor | slice, slots: np.ndarray, last: np.ndarray, pages: PageTable, pool: KVPool,
             table: Tensor, reselect: Reselect | None = None) -> SparseRows:
        """What draft rows of `slots` [n] at positions `last` [n] see; table: the device's copy of pages.pages."""

        def to(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(self.device, non_blocking=True)

        tail = self.tail[slots]
        return SparseRows(rows, to(slots), to(last), to(tail), self.positions, self.counts, table, pages.page_size,
                          int(self.width[slots].max(initial=0)), int((last - tail).max()) + 1, pool, reselect)

    def bytes_read(self, slots: np.ndarray, last: np.ndarray, bytes_per_entry: int) -> int:
        """KV bytes that draft passes of `slots` up to `last` read, over all layers."""
        tail = (last - self.tail[slots] + 1) * self.config.num_layers * self.config.num_kv_heads
        return int(self.entries[slots].sum() + tail.sum()) * bytes_per_entry
