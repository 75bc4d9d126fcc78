"""What every attention backend takes and gives.

A batch is rows of queries in items. Each item sees its KV through a view: `DenseItem` all committed entries up to each
row, `SparseGroup` per layer and KV head the selected entries and then the tail. Every row's own K and V are written
before anything is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

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


@dataclass(frozen=True)
class SparseGroup:
    """The batch's first `count` rows, one an item.

    entries [layers, count, KV heads, width] int64 in the pool; valid, same shape, False where padding (its entry is a
    legal one to read).
    """

    count: int
    entries: Tensor
    valid: Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """One step: where each row's K and V go (entries [N] int64), and the views."""

    entries: Tensor
    sparse: SparseGroup | None
    dense: list[DenseItem]
    sink: ScoreSink | None = None


class AttentionBackend(ABC):
    """plan(batch) once a step, then run(layer, q, k, v) for each layer in order."""

    name: ClassVar[str]

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        self.config, self.pool = config, pool
        self.scale = config.head_dim**-0.5

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare a step."""

    @abstractmethod
    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [N, KV heads, D], attend with q [N, heads, D]; gives [N, heads · D]."""
