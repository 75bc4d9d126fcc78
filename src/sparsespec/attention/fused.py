"""The fused attention kernel with its buffers: plan a step's work on the CPU, then launch it once a layer.

Everything that a launch needs from the host lies in one buffer on the device, which `plan` fills with one copy; grids depend
on the number of programs alone. So a CUDA graph that captured `run` stays right for any later plan that fits the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from sparsespec.attention.staging import Staging
from sparsespec.attention.work import Tiling, Views, Work, cut
from sparsespec.kernels.attention import attention_kernel, merge_kernel
from sparsespec.kernels.scores import score_kernel

Ints = npt.NDArray[np.int32]
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
class Items:
    """A step's items as arrays [items], in the order of their rows.

    slots: row of the page table and of the selections. starts: position of the first row. rows: query rows. sparse: sees the
    slot's selection and from tails on. widths: the most entries that the selection has. collect: number of the collecting item
    or -1. score_rows: last rows that score. refs: first rows of which this round's drafts left an LSE (0: scores are exact,
    from a second reading of K).
    """

    slots: Ints
    starts: Ints
    rows: Ints
    sparse: npt.NDArray[np.bool_]
    tails: Ints
    widths: Ints
    collect: Ints
    score_rows: Ints
    refs: Ints

    @staticmethod
    def build(slots: npt.ArrayLike, starts: npt.ArrayLike, rows: npt.ArrayLike, **given: npt.ArrayLike) -> Items:
        """From what is given; the rest says full views without scores."""
        n = np.asarray(slots).shape[0]
        filled = {"sparse": np.zeros(n, bool), "tails": np.zeros(n), "widths": np.zeros(n), "collect": np.full(n, -1),
                  "score_rows": np.zeros(n), "refs": np.zeros(n), **given}
        ints = {name: np.asarray(a).astype(bool if name == "sparse" else np.int32) for name, a in filled.items()}
        return Items(np.asarray(slots, np.int32), np.asarray(starts, np.int32), np.asarray(rows, np.int32), **ints)


@dataclass(frozen=True)
class Launch:
    """How the kernel is compiled and launched: rows of large tiles, entries of a block, pipeline depth, warps, programs an SM."""

    large_rows: int = 64
    block: int = 64
    stages: int = 3
    warps: int = 4
    occupancy: int = 2


@dataclass
class Selection:
    """Positions [slots, layers, KV heads, width] int32 of which counts [slots, layers, KV heads] hold."""

    positions: Tensor
    counts: Tensor


@dataclass
class FusedAttention:
    """plan(items) once a step, run(layer, ...) for each layer. table [slots, max_pages] int32 lies on the device."""

    shape: Shape
    table: Tensor
    launch: Launch = field(default_factory=Launch)
    programs: int | None = None
    max_items: int = 512

    def __post_init__(self) -> None:
        s, device = self.shape, self.table.device
        if self.programs is None:
            sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
            self.programs = sms * self.launch.occupancy
        small = max(16, triton.next_power_of_2(s.group))
        self.tiling = Tiling((small, max(self.launch.large_rows, small)), self.launch.block)
        self.block_d = max(16, triton.next_power_of_2(s.head_dim))
        self.staging = Staging(device, {"header": 16, "starts": self.programs + 1, "merges": 16 * self.programs,
                                        "items": 16 * self.max_items, "pieces": 8 * (self.max_items * s.kv_heads * 2)})
        rows = 2 * self.programs * self.tiling.rows[1]
        self.part_out = torch.empty(rows, self.block_d, dtype=torch.float32, device=device)
        self.part_lse = torch.empty(rows, dtype=torch.float32, device=device)
        self.lse = torch.zeros(self.table.shape[0], s.layers, s.ring, s.heads, dtype=torch.float32, device=device)
        self.scores = torch.empty(s.layers, s.kv_heads, 0, dtype=torch.float32, device=device)
        zeros = torch.zeros(self.table.shape[0], s.layers, s.kv_heads, dtype=torch.int32, device=device)
        self.selection = Selection(zeros.unsqueeze(-1), zeros)
        self.kinds = 7

    def plan(self, items: Items) -> Work:
        """Cut the step's work and send it to the device."""
        s = self.shape
        collecting = items.collect >= 0
        self._exact = collecting & (items.refs == 0)
        fused = collecting & ~self._exact & (items.rows * s.group <= self.tiling.rows[1])
        self._exact = collecting & ~fused
        ends = items.starts + items.rows
        lengths = np.where(items.sparse, items.widths + ends - items.tails, ends)
        work = cut(Views(items.rows, lengths, items.sparse, fused), s.kv_heads, s.group, self.tiling, int(self.programs or 0))
        keys = np.where(collecting, ends - items.score_rows, 0)
        self.score_starts = np.cumsum(keys) - keys
        self.score_lengths = keys
        self._reserve_scores(int(keys.sum()))
        row = np.cumsum(items.rows) - items.rows
        table = np.zeros((len(items.slots), 16), np.int32)
        for i, column in enumerate((items.slots, row, items.rows, items.starts, np.where(items.sparse, items.tails, 0), items.sparse,
                                    self.score_starts, items.score_rows, items.refs, items.sparse | self._exact)):
            table[:, i] = column
        header = np.zeros(16, np.int32)
        header[0] = len(work.merges)
        self.staging.send({"header": header, "starts": work.starts, "merges": work.merges, "items": table, "pieces": work.pieces})
        self.merges = len(work.merges)
        self.exact_items = np.flatnonzero(self._exact)
        return work

    def _reserve_scores(self, keys: int) -> None:
        if keys > self.scores.shape[2]:
            size = triton.next_power_of_2(keys)
            self.scores = torch.empty(*self.scores.shape[:2], size, dtype=torch.float32, device=self.table.device)

    def run(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of q [N, heads, D] over keys, values [KV heads, entries, D] of this layer: [N, heads, D]."""
        out = torch.empty_like(q)
        self.attend(layer, q, keys, values, out)
        self.merge(layer, out)
        if len(self.exact_items):
            self.score(layer, q, keys)
        return out

    def attend(self, layer: int, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """The fused launch; tiles that were cut are not yet in `out`."""
        s, t, part = self.shape, self.tiling, self.staging.part
        attention_kernel[(self.programs,)](
            q, keys, values, out, self.part_out, self.part_lse, part("starts"), part("pieces"), part("items"), self.table,
            self.selection.positions, self.selection.counts, self.lse, self.scores[layer], layer, s.layers, self.table.shape[1],
            self.selection.positions.shape[3], self.scores.shape[2], keys.stride(0), s.head_dim**-0.5,
            GROUP=s.group, KV_HEADS=s.kv_heads, D=s.head_dim, BLOCK_D=self.block_d, STRIDE=keys.stride(1), PAGE=s.page_size,
            RING=s.ring, M_SMALL=t.rows[0], M_LARGE=t.rows[1], N_SMALL=t.block, N_LARGE=t.block,
            KINDS=self.kinds, num_warps=self.launch.warps, num_stages=self.launch.stages)

    def merge(self, layer: int, out: Tensor) -> None:
        """Combine the tiles that were cut."""
        s, t, part = self.shape, self.tiling, self.staging.part
        merge_kernel[(self.programs, t.rows[1] // _MERGE_ROWS)](
            out, self.part_out, self.part_lse, part("merges"), part("items"), self.lse, part("header"), layer, s.layers,
            GROUP=s.group, KV_HEADS=s.kv_heads, D=s.head_dim, BLOCK_D=self.block_d, RING=s.ring, M_LARGE=t.rows[1],
            ROWS=_MERGE_ROWS, num_warps=4)

    def score(self, layer: int, q: Tensor, keys: Tensor) -> None:
        """Exact scores of the items without draft LSEs: a second reading of K with the LSE that attention just left."""
        s = self.shape
        which = torch.from_numpy(self.exact_items.astype(np.int32)).to(q.device)
        longest = int(self.score_lengths[self.exact_items].max(initial=0))
        score_kernel[(len(which), s.kv_heads, max(1, triton.cdiv(longest, _SCORE_BLOCK)))](
            q, keys, which, self.staging.part("items"), self.table, self.lse, self.scores[layer], layer, s.layers,
            self.table.shape[1], self.scores.shape[2], keys.stride(0), s.head_dim**-0.5, GROUP=s.group, KV_HEADS=s.kv_heads,
            D=s.head_dim, BLOCK_D=self.block_d, STRIDE=keys.stride(1), PAGE=s.page_size, RING=s.ring,
            M=max(16, triton.next_power_of_2(s.ring // 2 * s.group)), BLOCK_N=_SCORE_BLOCK)
