"""Which KV entries each request's drafts may see: kept as positions, which stay true when pages move."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsespec.attention.base import SparseGroup
from sparsespec.config.model import ModelConfig
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
        if width > self.positions.shape[-1]:
            grown = torch.zeros(*self._shape, max(width, 2 * self.positions.shape[-1]), dtype=torch.int32, device=self.device)
            grown[..., :self.positions.shape[-1]] = self.positions
            self.positions = grown
        self.positions[slot, :, :, :width] = positions
        self.counts[slot] = width if counts is None else counts
        self.tail[slot], self.width[slot] = tail, width
        self.entries[slot] = positions.numel() if counts is None else int(counts.sum())

    def group(self, slots: np.ndarray, last: np.ndarray, pages: PageTable) -> SparseGroup:
        """The views of one draft row each of `slots` [n], at positions `last` [n]."""
        device, size = self.device, pages.page_size
        width = int(self.width[slots].max(initial=0))
        longest = int((last - self.tail[slots]).max()) + 1
        index = torch.from_numpy(slots.astype(np.int64)).to(device)
        chosen = self.positions[index, :, :, :width].permute(1, 0, 2, 3).long()  # [layers, n, heads, width]
        layers, n, heads, _ = chosen.shape
        tail_np = self.tail[slots][:, None] + np.arange(longest)
        tail = torch.from_numpy(np.minimum(tail_np, last[:, None])).to(device)
        valid_tail = torch.from_numpy(tail_np <= last[:, None]).to(device)
        valid = torch.arange(width, device=device) < self.counts[index].transpose(0, 1).unsqueeze(-1)
        shape = (layers, n, heads, longest)
        places = torch.cat((torch.where(valid, chosen, tail[:, None, :1]), tail[:, None].expand(shape)), -1)
        table = torch.from_numpy(pages.pages[slots]).to(device)
        row = torch.arange(n, device=device)[:, None, None]
        entries = table[row, places // size].long() * size + places % size
        return SparseGroup(n, entries, torch.cat((valid, valid_tail[:, None].expand(shape)), -1))

    def bytes_read(self, slots: np.ndarray, last: np.ndarray, bytes_per_entry: int) -> int:
        """KV bytes that `group` makes the drafts read, over all layers."""
        tail = (last - self.tail[slots] + 1) * self.config.num_layers * self.config.num_kv_heads
        return int(self.entries[slots].sum() + tail.sum()) * bytes_per_entry
