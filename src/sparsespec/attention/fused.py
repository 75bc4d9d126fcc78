"""The fused attention kernel with its buffers: plan a step's work on the CPU, then launch it once a layer.

Everything that a launch needs from the host lies in one buffer on the device, which `plan` fills with one copy; grids depend
on the number of programs alone. So a CUDA graph that captured `run` stays right for any later plan that fits the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from sparsespec.attention.items import DeviceViews, Items
from sparsespec.attention.staging import Staging
from sparsespec.attention.work import Tiles, Tiling, Work, cut
from sparsespec.kernels.attention import attention_kernel, merge_kernel
from sparsespec.kernels.scores import score_kernel

_MERGE_ROWS = 16
_SCORE_BLOCK = 64


@dataclass(frozen=True)
class Shape:
    """What kernels are compiled for. ring: positions, a power of two, whose LSE is kept of each slot and layer."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    ring: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Launch:
    """How the kernel is compiled and launched: rows of large tiles, entries of a block, pipeline depth, warps, programs an SM."""

    large_rows: int = 64
    block: int = 64
    stages: int = 3
    warps: int = 4
    occupancy: int = 2


class FusedAttention:
    """plan(items, views) once a step, run(layer, ...) for each layer."""

    def __init__(self, shape: Shape, slots: int, device: torch.device, launch: Launch | None = None, programs: int | None = None,
                 max_items: int = 512) -> None:
        self.shape, self.launch, s = shape, launch or Launch(), shape
        if programs is None:
            sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
            programs = sms * self.launch.occupancy
        self.programs = programs
        small = max(16, triton.next_power_of_2(s.group))
        self.tiling = Tiling((small, max(self.launch.large_rows, small)), self.launch.block)
        self.block_d = max(16, triton.next_power_of_2(s.head_dim))
        self.staging = Staging(device, {"header": 16, "starts": programs + 1, "merges": 16 * programs,
                                        "items": 16 * max_items, "pieces": 16 * max_items * s.kv_heads})
        rows = 2 * programs * self.tiling.rows[1]
        self.part_out = torch.empty(rows, self.block_d, dtype=torch.float32, device=device)
        self.part_lse = torch.empty(rows, dtype=torch.float32, device=device)
        self.lse = torch.zeros(slots, s.layers, s.ring, s.heads, dtype=torch.float32, device=device)
        self.scores = torch.empty(s.layers, s.kv_heads, 0, dtype=torch.float32, device=device)
        self.kinds = 7  # those that programs are compiled for

    def plan(self, items: Items, views: DeviceViews) -> Work:
        """Cut the step's work and send it to the device."""
        s = self.shape
        ends, scoring = items.starts + items.rows, items.score_rows > 0
        fused = scoring & (items.refs > 0) & (items.rows * s.group <= self.tiling.rows[1])
        exact = scoring & ~fused
        lengths = np.where(items.sparse, items.widths + ends - items.tails, ends)
        work = cut(Tiles(items.rows, lengths, items.sparse, fused), s.kv_heads, s.group, self.tiling, self.programs)
        self.score_lengths = np.where(scoring, ends - items.score_rows, 0)
        self.score_starts = np.cumsum(self.score_lengths) - self.score_lengths
        self._reserve_scores(int(self.score_lengths.sum()))
        table = np.zeros((len(items.slots), 16), np.int32)
        for i, column in enumerate((items.slots, np.cumsum(items.rows) - items.rows, items.rows, items.starts,
                                    np.where(items.sparse, items.tails, 0), items.sparse, self.score_starts, items.score_rows,
                                    items.refs, items.sparse | exact)):
            table[:, i] = column
        header = np.zeros(16, np.int32)
        header[0] = len(work.merges)
        self.staging.send({"header": header, "starts": work.starts, "merges": work.merges, "items": table, "pieces": work.pieces})
        self._views, self._exact = views, np.flatnonzero(exact)
        if len(self._exact):
            self._exact_items = torch.from_numpy(self._exact.astype(np.int32)).to(self.part_out.device)
            self._exact_rows = int(items.score_rows[self._exact].max())
            self._exact_blocks = max(1, triton.cdiv(int(self.score_lengths[self._exact].max()), _SCORE_BLOCK))
        return work

    def _reserve_scores(self, keys: int) -> None:
        if keys > self.scores.shape[2]:
            self.scores = torch.empty(*self.scores.shape[:2], triton.next_power_of_2(keys), dtype=torch.float32,
                                      device=self.scores.device)

    def mean_scores(self, item: int) -> Tensor:
        """[layers, KV heads, keys before the item's first scored row]; valid until the next plan."""
        start = int(self.score_starts[item])
        return self.scores[:, :, start:start + int(self.score_lengths[item])]

    def run(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of q [N, heads, D] over keys, values [KV heads, entries, D] of this layer: [N, heads, D]."""
        out = torch.empty_like(q)
        self.attend(layer, q, keys, values, out)
        self.merge(layer, out)
        if len(self._exact):
            self.score(layer, q, keys)
        return out

    def attend(self, layer: int, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """The fused launch; tiles that were cut are not yet in `out`."""
        s, t, part, views = self.shape, self.tiling, self.staging.part, self._views
        attention_kernel[(self.programs,)](
            q, keys, values, out, self.part_out, self.part_lse, part("starts"), part("pieces"), part("items"), views.table,
            views.positions, views.counts, self.lse, self.scores[layer], layer, s.layers, views.table.shape[1],
            views.positions.shape[3], self.scores.shape[2], keys.stride(0), s.head_dim**-0.5,
            GROUP=s.group, KV_HEADS=s.kv_heads, D=s.head_dim, BLOCK_D=self.block_d, STRIDE=keys.stride(1), PAGE=s.page_size,
            RING=s.ring, M_SMALL=t.rows[0], M_LARGE=t.rows[1], N_SMALL=t.block, N_LARGE=t.block, KINDS=self.kinds,
            num_warps=self.launch.warps, num_stages=self.launch.stages)

    def merge(self, layer: int, out: Tensor) -> None:
        """Combine the tiles that were cut."""
        s, t, part = self.shape, self.tiling, self.staging.part
        merge_kernel[(self.programs, t.rows[1] // _MERGE_ROWS)](
            out, self.part_out, self.part_lse, part("merges"), part("items"), self.lse, part("header"), layer, s.layers,
            GROUP=s.group, KV_HEADS=s.kv_heads, D=s.head_dim, BLOCK_D=self.block_d, RING=s.ring, M_LARGE=t.rows[1],
            ROWS=_MERGE_ROWS, num_warps=4)

    def score(self, layer: int, q: Tensor, keys: Tensor) -> None:
        """Exact scores of the items without draft LSEs: a second reading of K with the LSE that attention just left."""
        s, table = self.shape, self._views.table
        score_kernel[(len(self._exact), s.kv_heads, self._exact_blocks)](
            q, keys, self._exact_items, self.staging.part("items"), table, self.lse, self.scores[layer], layer, s.layers,
            table.shape[1], self.scores.shape[2], keys.stride(0), s.head_dim**-0.5, GROUP=s.group, KV_HEADS=s.kv_heads,
            D=s.head_dim, BLOCK_D=self.block_d, STRIDE=keys.stride(1), PAGE=s.page_size, RING=s.ring,
            M=max(16, triton.next_power_of_2(self._exact_rows * s.group)), BLOCK_N=_SCORE_BLOCK)
