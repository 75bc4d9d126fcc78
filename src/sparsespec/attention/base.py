"""What every attention backend takes and gives.

A batch is rows of queries in items. Each item sees its KV through a view: `DenseItem` all committed entries up to each
row, `SparseRows` per layer and KV head the selected entries and then the tail. Every row's own K and V are written
before anything is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparsespec.attention.items import DeviceViews, Items
from sparsespec.config.model import ModelConfig
from sparsespec.kv.pool import KVPool

ScoreSink = Callable[[int, int, Tensor], None]
"""(layer, collect index, probabilities [KV heads, group, rows, kv_len] of the item's last rows)."""


@dataclass(frozen=True)
class DenseItem:
    """Rows [row, row + rows) at the last `rows` positions of a sequence of `kv_len` tokens, which lie in `runs` of entries.

    collect: index for the score sink, -1 for none. score_rows: how many of the last rows the sink wants.
    """

    row: int
    rows: int
    kv_len: int
    runs: list[tuple[int, int]]
    collect: int = -1
    score_rows: int = 0


class Reselect(Protocol):
    """A choice of entries that depends on the draft's own query (Quest, the oracle)."""

    def __call__(self, layer: int, q: Tensor, rows: SparseRows) -> tuple[Tensor, Tensor]:
        """(entries [n, KV heads, w] int64 in the pool, valid) for queries q [n, KV heads, group, D], scaled."""
        ...


@dataclass(frozen=True)
class SparseRows:
    """Rows that each see the selection of their request and then every position from its tail up to themselves.

    rows: where they are in the batch. slots, last, tail [n] int64: each row's request, its own position and the first that
    is always seen. positions [slots, layers, KV heads, width] int32 with counts [slots, layers, KV heads]: the selections
    of all requests, of which these rows' are at most `width` wide. table [slots, pages] int32: a request's pages, so that
    position p lies at entry table[p // page_size] * page_size + p % page_size. longest: entries of the longest tail.
    """

    rows: Tensor | slice
    slots: Tensor
    last: Tensor
    tail: Tensor
    positions: Tensor
    counts: Tensor
    table: Tensor
    page_size: int
    width: int
    longest: int
    pool: KVPool
    reselect: Reselect | None = None

    def resolve(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """(entries [n, KV heads, w] int64 in the pool, valid): what each row sees in a layer; padding is a legal entry to read."""
        if self.reselect is not None:
            return self.reselect(layer, q, self)
        entries, valid = self._all_layers
        return entries[layer], valid[layer]

    def entries(self, positions: Tensor) -> Tensor:
        """Entries of positions [n, ...] of each row's request, same shape, int64."""
        row = self.slots.view(-1, *(1,) * (positions.dim() - 1))
        return self.table[row, positions // self.page_size].long() * self.page_size + positions % self.page_size

    def tail_positions(self) -> tuple[Tensor, Tensor]:
        """(positions [n, longest], valid) from each row's tail to itself."""
        places = self.tail[:, None] + torch.arange(self.longest, device=self.tail.device)
        return torch.minimum(places, self.last[:, None]), places <= self.last[:, None]

    def with_tail(self, positions: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """(entries, valid) of positions [n, KV heads, w], of which counts [n, KV heads] hold, and of the tail after them."""
        tail, valid_tail = self.tail_positions()
        shape = (*counts.shape, self.longest)
        valid = torch.arange(positions.shape[-1], device=tail.device) < counts[..., None]
        places = torch.cat((torch.where(valid, positions, tail[:, None, :1]), tail[:, None].expand(shape)), -1)
        return self.entries(places), torch.cat((valid, valid_tail[:, None].expand(shape)), -1)

    @cached_property
    def _all_layers(self) -> tuple[Tensor, Tensor]:
        """Entries and validity [layers, n, KV heads, width + longest] of every layer."""
        n, layers, heads = len(self.slots), *self.counts.shape[1:]
        chosen = self.positions[self.slots, :, :, :self.width].view(n, layers * heads, -1).long()
        entries, valid = self.with_tail(chosen, self.counts[self.slots].view(n, -1))
        shape = (n, layers, heads, -1)
        return entries.view(shape).transpose(0, 1), valid.view(shape).transpose(0, 1)


@dataclass(frozen=True)
class AttentionBatch:
    """One step: where each row's K and V go (entries [N] int64), and the views. sparse: one part a way of selecting.

    items, views: the same views as arrays, for backends that resolve them by themselves. Given to one, `sparse` need hold only
    parts that reselect, and `dense` only items with a score sink.
    """

    entries: Tensor
    sparse: list[SparseRows]
    dense: list[DenseItem]
    sink: ScoreSink | None = None
    items: Items | None = None
    views: DeviceViews | None = None


class AttentionBackend(ABC):
    """plan(batch) once a step, then run(layer, q, k, v) for each layer in order."""

    name: ClassVar[str]
    resolves_views: ClassVar[bool] = False  # takes `items` and `views`, and gives `mean_scores`

    def __init__(self, config: ModelConfig, pool: KVPool, max_drafts: int = 8) -> None:
        self.config, self.pool, self.max_drafts = config, pool, max_drafts
        self.scale = config.head_dim**-0.5

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare a step."""

    @abstractmethod
    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [N, KV heads, D], attend with q [N, heads, D]; gives [N, heads · D]."""

    def mean_scores(self, item: int) -> Tensor:
        """Of an item with score_rows: the mean over these rows and the group of the probability of each key before them,
        [layers, KV heads, keys], complete after the last layer and valid until the next plan."""
        raise NotImplementedError(f"{self.name} hands probabilities to a sink")
