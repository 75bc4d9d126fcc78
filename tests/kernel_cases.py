"""Random attention batches with their explicit reference, shared by the kernel tests and the GPU checks.

Pages lie in random order, free ones and what lies past a sequence hold NaN, and lengths are ragged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsespec.attention.fused import FusedAttention, Launch, Shape
from sparsespec.attention.items import DeviceViews, Items


@dataclass
class Case:
    """A batch over random sequences. cache [layers, 2, KV heads, entries, D]; q [layers, N, heads, D]."""

    shape: Shape
    items: Items
    views: DeviceViews
    cache: Tensor
    q: Tensor

    @staticmethod
    def random(shape: Shape, rows: list[int], lengths: list[int], sparse: int, seed: int = 0, *, width: int = 12,
               score_rows: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Case:
        """Item i has rows[i] query rows at the end of lengths[i] tokens; the first `sparse` of them see selections."""
        rng, generator = np.random.default_rng(seed), torch.Generator(device).manual_seed(seed)
        size, n = shape.page_size, len(rows)
        need = [-(-length // size) for length in lengths]
        pages = rng.permutation(sum(need) + 3).astype(np.int32)
        slots = rng.permutation(n + 1)[:n].astype(np.int32)
        table = np.zeros((n + 1, max(need)), np.int32)
        live = np.zeros(len(pages) * size, bool)
        taken = 0
        for slot, length, count in zip(slots, lengths, need, strict=True):
            own = pages[taken:taken + count]
            taken += count
            table[slot, :count] = own
            position = np.arange(length)
            live[own[position // size] * size + position % size] = True
        cache = torch.randn(shape.layers, 2, shape.kv_heads, len(live), shape.head_dim, generator=generator, device=device,
                            dtype=torch.float32).to(dtype)
        cache[:, :, :, torch.from_numpy(~live).to(device)] = torch.nan
        q = torch.randn(shape.layers, sum(rows), shape.heads, shape.head_dim, generator=generator, device=device).to(dtype)
        ends = np.asarray(lengths, np.int32)
        starts = ends - np.asarray(rows, np.int32)
        is_sparse = np.arange(n) < sparse
        tails = np.where(is_sparse, rng.integers(0, starts + 1), 0)
        counts = np.minimum(rng.integers(0, width + 1, (n + 1, shape.layers, shape.kv_heads)), width)
        positions = np.zeros((n + 1, shape.layers, shape.kv_heads, max(width, 1)), np.int32)
        for slot, tail in zip(slots[:sparse], tails[:sparse], strict=True):
            counts[slot] = np.minimum(counts[slot], tail)
            for place in np.ndindex(shape.layers, shape.kv_heads):
                positions[slot][place][:counts[slot][place]] = rng.permutation(tail)[:counts[slot][place]]
        positions[..., -1:][counts[..., None] < width] = 2**31 - 1  # whatever reads past a count goes astray
        scored = (np.arange(n) >= sparse) & (score_rows > 0)
        items = Items.build(slots, starts, rows, sparse=is_sparse, tails=tails, widths=np.where(is_sparse, width, 0),
                            score_rows=np.where(scored, np.minimum(rows, score_rows), 0))
        put = lambda a: torch.from_numpy(np.ascontiguousarray(a, np.int32)).to(device)  # noqa: E731
        return Case(shape, items, DeviceViews(put(table), size, put(positions), put(counts)), cache, q)

    def fused(self, programs: int | None = None, launch: Launch | None = None) -> FusedAttention:
        """The kernel, planned for this batch, its buffers poisoned."""
        table = self.views.table
        made = FusedAttention(self.shape, table.shape[0], table.device, launch, programs)
        made.part_out.fill_(torch.nan)
        made.part_lse.fill_(torch.nan)
        made.plan(self.items, self.views)
        made.scores.fill_(torch.nan)
        return made

    def keys_of(self, item: int, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [KV heads, length, D] of an item in float64."""
        i, size = self.items, self.shape.page_size
        position = torch.arange(int(i.starts[item] + i.rows[item]), device=self.views.table.device)
        entry = self.views.table[int(i.slots[item])].long()[position // size] * size + position % size
        k, v = self.cache[layer, :, :, entry].double()
        return k, v

    def seen(self, item: int, layer: int) -> Tensor:
        """[KV heads, rows, length]: which positions a row sees."""
        i = self.items
        start, rows = int(i.starts[item]), int(i.rows[item])
        position = torch.arange(start + rows)
        causal = position <= start + torch.arange(rows)[:, None]
        chosen = torch.ones(self.shape.kv_heads, 1, start + rows, dtype=torch.bool)
        if i.sparse[item]:
            chosen = (position >= int(i.tails[item])).repeat(self.shape.kv_heads, 1, 1)
            slot = int(i.slots[item])
            for head in range(self.shape.kv_heads):
                count = int(self.views.counts[slot, layer, head])
                chosen[head, 0, self.views.positions[slot, layer, head, :count].long().cpu()] = True
        return (chosen & causal).to(self.views.table.device)

    def expected(self, layer: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Outputs [N, heads, D], and by item the softmax probabilities [KV heads, group, rows, length] and LSEs in units of
        log 2 [KV heads, group, rows]; float64."""
        s, row, outs, probs, lses = self.shape, 0, [], [], []
        for item in range(len(self.items.rows)):
            rows = int(self.items.rows[item])
            q = self.q[layer, row:row + rows].double().view(rows, s.kv_heads, s.group, s.head_dim)
            row += rows
            k, v = self.keys_of(item, layer)
            logits = torch.einsum("rhgd,hld->hgrl", q, k) * s.head_dim**-0.5
            logits = logits.masked_fill(~self.seen(item, layer)[:, None], -torch.inf)
            p = logits.softmax(-1)
            outs.append(torch.einsum("hgrl,hld->rhgd", p, v).reshape(rows, s.heads, s.head_dim))
            probs.append(p)
            lses.append(logits.logsumexp(-1) * 1.4426950408889634)
        return torch.cat(outs), probs, lses


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative error in the 2-norm; infinite where `found` has NaN."""
    difference = float((found.double() - wanted).norm() / wanted.norm())
    return float("inf") if math.isnan(difference) else difference
