"""Cuts a step's attention into equal shares of work for the GPU's programs. NumPy arrays over items; no loop.

The tiles of all items and KV heads lie end to end on a line, each as long as its cost: KV blocks, and a fixed part. The line
is cut into as many equal shares as there are programs (Stream-K), so that a long context among short ones keeps no program
busy after the others. A tile that a cut goes through leaves one partial result a piece, to be merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparsespec.kernels.attention import COLLECT, LARGE, SMALL

Ints = npt.NDArray[np.int32]
_FIELDS = 8


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles and what they cost.

    rows: packed query rows of a small and of a large tile. block: KV entries of one block (of both). block_cost: of one block
    by kind (small, large, collecting), in units of one small block; sparse_cost: factor on it for selected entries.
    fixed_cost: of starting a tile. min_blocks: a share has at least so many, or fewer programs work.
    """

    rows: tuple[int, int]
    block: int = 64
    block_cost: tuple[float, float, float] = (1.0, 1.1, 1.2)
    sparse_cost: float = 1.15
    fixed_cost: float = 1.5
    min_blocks: int = 4


@dataclass(frozen=True)
class Tiles:
    """Items as arrays [items]: query rows, entries that the last row sees (an upper bound will do), whether the view is sparse,
    and whether the tile collects scores."""

    rows: Ints
    lengths: Ints
    sparse: npt.NDArray[np.bool_]
    collect: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Work:
    """pieces [n, 8]: item, head, query tile, lo, hi, part, kind, 0. starts [programs + 1] into them. merges [m, 8]: item, head,
    first packed row, first part, parts, rows of the tile, 0, 0. kinds: bits of the kinds that occur."""

    pieces: Ints
    starts: Ints
    merges: Ints
    parts: int
    kinds: int


def cut(of_items: Tiles, kv_heads: int, group: int, tiling: Tiling, programs: int) -> Work:
    """Shares of work for `programs` programs."""
    packed = of_items.rows * group
    kind = np.where(of_items.collect, COLLECT, np.where(packed > tiling.rows[0], LARGE, SMALL))
    height = np.where(kind == SMALL, tiling.rows[0], tiling.rows[1])
    per_item = -(-packed // height)
    item = np.repeat(np.arange(len(packed)), per_item)
    qtile = np.arange(len(item)) - np.repeat(np.cumsum(per_item) - per_item, per_item)
    kind, height = kind[item], height[item]
    seen_rows = np.minimum(((qtile + 1) * height - 1) // group + 1, of_items.rows[item])  # the tile's last row
    blocks = -(-(of_items.lengths[item] - of_items.rows[item] + seen_rows) // tiling.block)
    rate = np.asarray(tiling.block_cost)[kind] * np.where(of_items.sparse[item], tiling.sparse_cost, 1.0)

    tiles = len(item) * kv_heads
    cost = np.repeat(blocks * rate + tiling.fixed_cost, kv_heads)
    ends = np.cumsum(cost)
    total = float(ends[-1]) if tiles else 0.0
    active = int(min(programs, max(1.0, total // (tiling.min_blocks + tiling.fixed_cost))))
    at = np.arange(1, active) * (total / active)
    tile = np.minimum(np.searchsorted(ends, at), tiles - 1) if tiles else np.zeros(0, np.int64)
    of = tile // kv_heads
    block = np.rint((at - (ends[tile] - cost[tile]) - tiling.fixed_cost) / rate[of]).astype(np.int64)
    block = np.where(block < 2, 0, np.where(block > blocks[of] - 2, blocks[of], block))  # no slivers
    whole = block == blocks[of]
    cut_key = np.where(whole, (tile + 1) << 32, (tile << 32) + block)

    keys = np.unique(np.concatenate([np.arange(tiles, dtype=np.int64) << 32, cut_key[~whole]]))
    tile, lo = keys >> 32, keys & 0xFFFFFFFF
    first = lo == 0
    last = np.append(first[1:], True)
    of = tile // kv_heads
    hi = np.where(last, blocks[of], np.append(lo[1:], 0))
    partial = ~(first & last)
    part = np.where(partial, np.cumsum(partial) - 1, -1)
    pieces = np.stack([item[of], tile % kv_heads, qtile[of], lo * tiling.block, hi * tiling.block, part, kind[of],
                       np.zeros_like(of)], 1).astype(np.int32)
    starts = np.full(programs + 1, len(keys), np.int32)
    starts[0] = 0
    starts[1:active] = np.searchsorted(keys, cut_key)

    head_of = np.flatnonzero(first & partial)
    of = of[head_of]
    counts = np.flatnonzero(last & partial) - head_of + 1
    merges = np.stack([item[of], tile[head_of] % kv_heads, qtile[of] * height[of], part[head_of], counts, height[of],
                       np.zeros_like(of), np.zeros_like(of)], 1).astype(np.int32)
    present = np.unique(kind) if tiles else np.zeros(0, np.int64)
    return Work(pieces, starts, merges, int(partial.sum()), int(sum(1 << k for k in present)))
