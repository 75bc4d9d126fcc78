"""Attention kernels against the roofline of one GPU: read bandwidth first, then each shape's share of it.

    PYTHONPATH=src python benchmarks/kernels.py --part all --json results/kernels.json

Shapes are Qwen3-8B's (32 heads, 8 KV heads of 128, bf16, pages of 16). Several layers are run in turn, so that no layer finds
its KV in the L2 cache; a CUDA graph holds them, and a cell is the median over its replays of the time of one layer, with the
10th and 90th percentile. Bytes are K and V of every entry that a view holds, once. Each cell's output is compared with
plain PyTorch on some of its items in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsespec.attention.fused import FusedAttention, Launch, Shape
from sparsespec.attention.items import DeviceViews, Items
from sparsespec.attention.work import Tiling

LAYERS, HEADS, KV_HEADS, DIM, PAGE = 3, 32, 8, 128, 16
DENSE = ((64, 2048), (64, 8192), (96, 7680), (128, 4096), (192, 3072))
DEVICE = torch.device("cuda")


@triton.jit
def _read(x_ptr, out_ptr, per_program, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * per_program
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(0, per_program, BLOCK):
        acc += tl.load(x_ptr + at + i + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc, 0))


def timed(run: Callable[[], object], per: int, replays: int = 15) -> tuple[float, float, float]:
    """Microseconds of `run` / per: median, 10th and 90th percentile over the replays of a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        times = []
        for i in range(replays + 2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= 2:
                times.append(start.elapsed_time(end) * 1e3 / per)
    low, middle, high = np.percentile(times, (10, 50, 90))
    return float(middle), float(low), float(high)


def read_bandwidth() -> float:
    """GB/s of reading 4 GiB once, by the best of some ways to do it."""
    data = torch.empty(1 << 31, dtype=torch.bfloat16, device=DEVICE).normal_()
    best = 0.0
    for programs, block, warps in ((1 << 14, 4096, 8), (1 << 13, 8192, 8), (1 << 15, 2048, 4)):
        out = torch.empty(programs, device=DEVICE)
        per = data.numel() // programs
        us = timed(lambda o=out, p=per, n=programs, b=block, w=warps: _read[(n,)](data, o, p, BLOCK=b, num_warps=w), 1)[0]  # type: ignore[misc]
        best = max(best, data.numel() * 2 / us / 1e3)
    return best


@dataclass
class Pool:
    """KV of a few layers with pages in random order, as [layers, 2, KV heads, entries, D] or with K and V of an entry adjacent."""

    entries: int
    adjacent: bool = False
    data: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = (LAYERS, KV_HEADS, self.entries, 2, DIM) if self.adjacent else (LAYERS, 2, KV_HEADS, self.entries, DIM)
        self.data = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        for layer in self.data:
            layer.normal_()

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        if self.adjacent:
            return self.data[layer, :, :, 0], self.data[layer, :, :, 1]
        return self.data[layer, 0], self.data[layer, 1]


@dataclass
class Batch:
    """Items over a pool, and a selection for its sparse ones."""

    items: Items
    views: DeviceViews
    q: Tensor

    @property
    def bytes(self) -> float:
        """K and V that one layer's views hold."""
        i = self.items
        seen = np.where(i.sparse, i.widths + i.starts + i.rows - i.tails, i.starts + i.rows)
        return float(seen.sum()) * KV_HEADS * DIM * 2 * 2

    @staticmethod
    def make(pool: Pool, rows: list[int], lengths: list[int], sparse: int, width: int, *, collect: bool = False, refs: bool = True,
             seed: int = 0) -> Batch:
        rng = np.random.default_rng(seed)
        n = len(rows)
        need = [-(-x // PAGE) for x in lengths]
        pages = rng.permutation(pool.entries // PAGE)[:sum(need)].astype(np.int32)
        table = np.zeros((n, max(need)), np.int32)
        at = 0
        for i, count in enumerate(need):
            table[i, :count], at = pages[at:at + count], at + count
        r, ends = np.asarray(rows), np.asarray(lengths)
        is_sparse = np.arange(n) < sparse
        tails = np.where(is_sparse, ends - rng.integers(9, 18, n), 0)
        positions = torch.zeros(n, LAYERS, KV_HEADS, max(width, 1), dtype=torch.int32, device=DEVICE)
        for i in range(sparse):
            order = torch.rand(LAYERS, KV_HEADS, int(tails[i]), device=DEVICE).topk(width, -1, sorted=False).indices
            positions[i] = order.int()
        counts = torch.full((n, LAYERS, KV_HEADS), width, dtype=torch.int32, device=DEVICE)
        scored = collect & ~is_sparse
        items = Items.build(np.arange(n), ends - r, r, sparse=is_sparse, tails=tails, widths=np.where(is_sparse, width, 0),
                            score_rows=np.where(scored, r, 0), refs=np.where(scored & refs, r - 1, 0))
        q = torch.randn(int(r.sum()), HEADS, DIM, device=DEVICE).bfloat16()
        return Batch(items, DeviceViews(torch.from_numpy(table).to(DEVICE), PAGE, positions, counts), q)

    def part(self, sparse: bool) -> Batch:
        """Only its sparse or only its full items."""
        keep = self.items.sparse == sparse
        fields = {name: getattr(self.items, name)[keep] for name in self.items.__dataclass_fields__}
        return Batch(Items(**fields), self.views, self.q[torch.from_numpy(np.repeat(keep, self.items.rows)).to(DEVICE)])

    def reference(self, pool: Pool, layer: int, item: int) -> tuple[slice, Tensor]:
        """Rows of an item and their outputs in float32."""
        i = self.items
        first, rows, start, slot = int(i.rows[:item].sum()), int(i.rows[item]), int(i.starts[item]), int(i.slots[item])
        k_all, v_all = pool.kv(layer)
        q = self.q[first:first + rows].float().view(rows, KV_HEADS, HEADS // KV_HEADS, DIM)
        out = torch.empty_like(q)
        for head in range(KV_HEADS):
            position = torch.arange(start + rows, device=DEVICE)
            if i.sparse[item]:
                position = torch.cat((self.views.positions[slot, layer, head].long(), position[int(i.tails[item]):]))
            entry = self.views.table[slot].long()[position // PAGE] * PAGE + position % PAGE
            logits = torch.einsum("rgd,ld->rgl", q[:, head], k_all[head, entry].float()) * DIM**-0.5
            last = start + torch.arange(rows, device=DEVICE)[:, None, None]
            out[:, head] = logits.masked_fill(position > last, -torch.inf).softmax(-1) @ v_all[head, entry].float()
        return slice(first, first + rows), out.view(rows, HEADS, DIM)


class Runner:
    """A planned batch, run over the layers in turn."""

    def __init__(self, pool: Pool, batch: Batch, launch: Launch, *, kinds: int | None = None, naive: bool = False,
                 tiling: Tiling | None = None) -> None:
        self.pool, self.batch = pool, batch
        shape = Shape(LAYERS, HEADS, KV_HEADS, DIM, PAGE, 16)
        tiles = len(batch.items.rows) * KV_HEADS if naive else None
        self.fused = FusedAttention(shape, batch.views.table.shape[0], DEVICE, launch, tiles)
        if tiling is not None:
            self.fused.tiling = tiling
        if naive:  # one tile size for everything, one program a tile, nothing cut
            self.fused.tiling = Tiling((launch.large_rows, launch.large_rows), launch.block, min_blocks=1 << 20)
        self.work = self.fused.plan(batch.items, batch.views)
        if naive:
            starts = np.arange(len(self.work.pieces) + 1, dtype=np.int32)
            self.fused.staging.part("starts")[:len(starts)] = torch.from_numpy(starts).to(DEVICE)
        self.fused.kinds = self.work.kinds if kinds is None else kinds
        self.out = torch.empty_like(batch.q)

    def layer(self, layer: int) -> None:
        keys, values = self.pool.kv(layer)
        self.fused.attend(layer, self.batch.q, keys, values, self.out)
        self.fused.merge(layer, self.out)

    def all(self) -> None:
        for layer in range(LAYERS):
            self.layer(layer)

    def error(self, items: int = 4) -> float:
        """Largest relative error over some items, outputs poisoned before."""
        self.out.fill_(torch.nan)
        self.layer(1)
        worst = 0.0 if bool(torch.isfinite(self.out).all()) else float("inf")
        for item in np.linspace(0, len(self.batch.items.rows) - 1, items).astype(int):
            rows, wanted = self.batch.reference(self.pool, 1, int(item))
            worst = max(worst, float((self.out[rows].float() - wanted).norm() / wanted.norm()))
        return worst


@dataclass
class Report:
    """Prints a row a cell and keeps it."""

    peak: float
    rows: list[dict[str, Any]] = field(default_factory=list)

    def cell(self, name: str, run: Runner, note: str = "") -> float:
        started = time.perf_counter()
        error = run.error()
        us, low, high = timed(run.all, LAYERS)
        rate = run.batch.bytes / us / 1e3
        self.rows.append({"name": name, "us": us, "p10": low, "p90": high, "gb_s": rate, "share": rate / self.peak, "error": error})
        print(f"{name:34s} {us:8.1f} us [{low:.1f} {high:.1f}]  {rate:6.0f} GB/s {100 * rate / self.peak:5.1f} %  err {error:.1e}  "
              f"pieces {len(run.work.pieces)} {note} ({time.perf_counter() - started:.1f} s)", flush=True)
        return us


def mix(pool: Pool, batch: int = 128, context: int = 8192, k: int = 8, ratio: float = 0.05, **settings: Any) -> Batch:
    """A steady iteration of unified scheduling: of each k + 1 requests one verifies and the others draft."""
    verify = batch // (k + 1)
    drafts = batch - verify
    return Batch.make(pool, [1] * drafts + [k + 1] * verify, [context] * batch, drafts, round(ratio * context), **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="all", help="comma-separated: dense, sparse, verify, mix, layout, all")
    parser.add_argument("--block", type=int, default=Launch.block)
    parser.add_argument("--stages", type=int, default=Launch.stages)
    parser.add_argument("--warps", type=int, default=Launch.warps)
    parser.add_argument("--occupancy", type=int, default=Launch.occupancy)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parts = set(args.part.split(","))
    launch = Launch(block=args.block, stages=args.stages, warps=args.warps, occupancy=args.occupancy)
    peak = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: reads {peak:.0f} GB/s; torch {torch.__version__}, triton {triton.__version__}")
    print(launch)
    report = Report(peak)
    measure(report, parts, launch)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"read_gb_s": peak, "cells": report.rows}, indent=1))


def measure(report: Report, parts: set[str], launch: Launch) -> None:
    """The cells of the chosen parts, and the ratios between them."""
    every = "all" in parts
    for adjacent in (False, True) if every or "layout" in parts else (False,):
        pool = Pool(128 * 8192, adjacent)
        tag = " K|V adjacent" if adjacent else ""
        if every or "dense" in parts:
            for n, context in DENSE[1:3] if adjacent else DENSE:
                report.cell(f"dense {n}x{context}{tag}", Runner(pool, Batch.make(pool, [1] * n, [context] * n, 0, 1), launch))
        if every or "sparse" in parts:
            report.cell(f"sparse 128x410 of 8192{tag}", Runner(pool, Batch.make(pool, [1] * 128, [8192] * 128, 128, 410), launch))
        if every or "verify" in parts:
            plain = report.cell(f"verify 32x8192{tag}", Runner(pool, Batch.make(pool, [9] * 32, [8192] * 32, 0, 1), launch))
            scored = report.cell(f"verify 32x8192, scores{tag}",
                                 Runner(pool, Batch.make(pool, [9] * 32, [8192] * 32, 0, 1, collect=True), launch))
            print(f"collection costs {100 * (scored / plain - 1):.1f} %")
        if every or "mix" in parts:
            mixed = mix(pool, collect=True)
            fused = report.cell(f"mix k=8 128x8192{tag}", Runner(pool, mixed, launch))
            two = sum(report.cell(f"  its {name} alone{tag}", Runner(pool, mixed.part(sparse), launch))
                      for name, sparse in (("drafts", True), ("verifications", False)))
            naive = report.cell(f"  one naive kernel{tag}", Runner(pool, mix(pool), launch, naive=True))
            print(f"two launches / fused {two / fused:.2f}; naive / fused {naive / fused:.2f}")
        del pool


if __name__ == "__main__":
    main()
