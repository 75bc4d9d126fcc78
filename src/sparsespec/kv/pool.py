"""The device memory that holds K and V."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsespec.config.model import ModelConfig


class KVPool:
    """K and V of `entries` tokens for every layer: [layers, 2, KV heads, entries, head_dim].

    Head-major, so that one head's entries are neighbours: a slice of a head is a plain matrix, and a selection of
    single entries is one gather over rows. An entry is a token; pages are runs of entries.
    """

    def __init__(self, config: ModelConfig, entries: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.entries, self.dtype, self.device = config, entries, dtype, device
        self.data = torch.empty(config.num_layers, 2, config.num_kv_heads, entries, config.head_dim, dtype=dtype, device=device)

    def k(self, layer: int) -> Tensor:
        """Keys of a layer [KV heads, entries, head_dim]."""
        return self.data[layer, 0]

    def v(self, layer: int) -> Tensor:
        """Values of a layer [KV heads, entries, head_dim]."""
        return self.data[layer, 1]

    def write(self, layer: int, entries: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [N, KV heads, head_dim] at entries [N]."""
        self.data[layer, 0].index_copy_(1, entries, k.transpose(0, 1).to(self.dtype))
        self.data[layer, 1].index_copy_(1, entries, v.transpose(0, 1).to(self.dtype))

    def planes(self, page_size: int) -> Tensor:
        """The same memory as pages: [layers · 2 · KV heads, pages, page_size · head_dim]. A page is a row of every plane."""
        return self.data.view(-1, self.entries // page_size, page_size * self.config.head_dim)

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of one token's K and V in one layer and one head, twice head_dim elements."""
        return 2 * self.config.head_dim * self.data.element_size()
