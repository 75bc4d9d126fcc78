"""The oracle in plain PyTorch, and the CPU's backend.

Every kernel is compared with it. On a CPU it reads KV as slices where a request's pages are neighbours, so that
decoding moves no byte twice; elsewhere items of one shape are gathered and computed as one padded batch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsespec.attention.base import AttentionBackend, AttentionBatch, DenseItem, SparseRows

_MAX_SLICES = 8  # more runs than this are gathered
_EXPLICIT_ROWS = 64  # more query rows than this go through PyTorch's fused attention
_GROUP_ENTRIES = 1 << 20  # padded entries of one gathered group: bounds its memory


@dataclass(frozen=True)
class _Gathered:
    """Items of one row count as a padded batch: index [n, width] of entries, kv_lens [n]."""

    items: list[DenseItem]
    index: Tensor
    kv_lens: Tensor


class TorchBackend(AttentionBackend):
    """See the module."""

    name = "torch"

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._sliced = [i for i in batch.dense if self._can_slice(i)]
        rest: dict[int, list[DenseItem]] = defaultdict(list)
        for item in batch.dense:
            if not self._can_slice(item):
                rest[item.rows].append(item)
        self._gathered = [g for items in rest.values() for g in self._groups(items)]
        self._head_offset = torch.arange(self.config.num_kv_heads, device=self.pool.device)[:, None] * self.pool.entries

    def _can_slice(self, item: DenseItem) -> bool:
        return self.pool.device.type == "cpu" and len(item.runs) <= _MAX_SLICES

    def _groups(self, items: list[DenseItem]) -> list[_Gathered]:
        """Sort by length, so that padding is small, and cut into groups of bounded size."""
        groups: list[list[DenseItem]] = [[]]
        for item in sorted(items, key=lambda i: i.kv_len):
            if groups[-1] and (len(groups[-1]) + 1) * item.kv_len > _GROUP_ENTRIES:
                groups.append([])
            groups[-1].append(item)
        out = []
        for group in groups:
            width = group[-1].kv_len
            index = torch.empty(len(group), width, dtype=torch.int64)
            for row, item in zip(index, group, strict=True):
                entries = torch.cat([torch.arange(start, start + count) for start, count in item.runs])
                row[:item.kv_len] = entries
                row[item.kv_len:] = entries[-1]  # padding reads an entry of its own: never a freed one
            lens = torch.tensor([i.kv_len for i in group])
            out.append(_Gathered(group, index.to(self.pool.device), lens.to(self.pool.device)))
        return out

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.write(layer, self.batch.entries, k, v)
        c = self.config
        rows = q.shape[0]
        q = q.to(self.pool.dtype).view(rows, c.num_kv_heads, c.group_size, c.head_dim) * self.scale
        out = torch.empty_like(q)
        for part in self.batch.sparse:
            out[part.rows] = self._attend_sparse(layer, q[part.rows], part)
        for item in self._sliced:
            self._run_sliced(layer, item, q, out)
        for group in self._gathered:
            self._run_gathered(layer, group, q, out)
        return out.view(rows, -1)

    def _attend_sparse(self, layer: int, q: Tensor, part: SparseRows) -> Tensor:
        """Outputs like q [n, KV heads, group, D]."""
        entries, valid = part.resolve(layer, q)
        index = (entries + self._head_offset).flatten()  # rows of [KV heads · entries, D]
        shape = (*entries.shape, self.config.head_dim)
        keys = self.pool.k(layer).flatten(0, 1).index_select(0, index).view(shape)
        values = self.pool.v(layer).flatten(0, 1).index_select(0, index).view(shape)
        logits = q @ keys.transpose(-1, -2)
        logits.masked_fill_(~valid.unsqueeze(2), -torch.inf)
        return torch.softmax(logits, -1) @ values

    def _run_sliced(self, layer: int, item: DenseItem, q: Tensor, out: Tensor) -> None:
        keys, values = self._slices(self.pool.k(layer), item), self._slices(self.pool.v(layer), item)
        rows = q[item.row:item.row + item.rows].permute(1, 2, 0, 3)  # [KV heads, group, rows, D]
        result, probs = self._attend(rows, keys, values, item)
        out[item.row:item.row + item.rows] = result.permute(2, 0, 1, 3)
        if item.collect >= 0 and self.batch.sink is not None:
            self.batch.sink(layer, item.collect, probs)

    @staticmethod
    def _slices(pool: Tensor, item: DenseItem) -> Tensor:
        parts = [pool[:, start:start + count] for start, count in item.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, item: DenseItem) -> tuple[Tensor, Tensor]:
        """q [H, G, R, D] over keys, values [H, L, D]: outputs [H, G, R, D] and the last score_rows' probabilities."""
        heads, group, rows, dim = q.shape
        if rows <= _EXPLICIT_ROWS:
            probs = self.probabilities(q, keys)
            return torch.bmm(probs.flatten(1, 2), values).view(q.shape), probs[:, :, rows - item.score_rows:]
        shape = (rows, keys.shape[1])
        if shape not in self._masks:
            self._masks[shape] = _causal(*shape, q.device).repeat(group, 1)
        mask = self._masks[shape]
        result = F.scaled_dot_product_attention(q.reshape(1, heads, group * rows, dim), keys[None], values[None],
                                                attn_mask=mask, scale=1.0).view(q.shape)
        probs = self.probabilities(q[:, :, rows - item.score_rows:], keys) if item.collect >= 0 else result
        return result, probs

    @staticmethod
    def probabilities(q: Tensor, keys: Tensor) -> Tensor:
        """Softmax of q [H, G, R, D] · keys [H, L, D], where row i of R sees the keys up to L - R + i."""
        heads, group, rows, dim = q.shape
        logits = torch.bmm(q.reshape(heads, group * rows, dim), keys.transpose(1, 2)).view(heads, group, rows, -1)
        if rows > 1:
            logits[..., -rows:].masked_fill_(~_causal(rows, rows, q.device), -torch.inf)
        return torch.softmax(logits, -1)

    def _run_gathered(self, layer: int, group: _Gathered, q: Tensor, out: Tensor) -> None:
        n, rows = len(group.items), group.items[0].rows
        row0 = torch.tensor([i.row for i in group.items], device=q.device)
        index = row0[:, None] + torch.arange(rows, device=q.device)
        keys = self.pool.k(layer)[:, group.index].transpose(0, 1)  # [n, KV heads, width, D]
        values = self.pool.v(layer)[:, group.index].transpose(0, 1)
        queries = q[index].permute(0, 2, 3, 1, 4)  # [n, KV heads, group, rows, D]
        width = keys.shape[2]
        last = (group.kv_lens[:, None] - rows + torch.arange(rows, device=q.device))[:, None, None, :, None]
        visible = torch.arange(width, device=q.device) <= last
        flat = queries.reshape(n, self.config.num_kv_heads, -1, self.config.head_dim)
        logits = (flat @ keys.transpose(-1, -2)).view(*queries.shape[:4], width)
        probs = torch.softmax(logits.masked_fill(~visible, -torch.inf), -1)
        result = (probs.flatten(2, 3) @ values).view(queries.shape)
        out[index] = result.permute(0, 3, 1, 2, 4)
        if self.batch.sink is not None:
            for p, item in zip(probs, group.items, strict=True):
                if item.collect >= 0:
                    self.batch.sink(layer, item.collect, p[:, :, rows - item.score_rows:, :item.kv_len])


def _causal(rows: int, width: int, device: torch.device) -> Tensor:
    """[rows, width] True where row i sees column j: j <= width - rows + i."""
    return torch.ones(rows, width, dtype=torch.bool, device=device).tril(width - rows)
