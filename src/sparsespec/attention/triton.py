"""The GPU's backend: every view of a step in one fused Triton launch a layer.

The common case takes a step as host arrays (`AttentionBatch.items`), resolves views on the device and keeps mean scores itself.
What only PyTorch can do is done by it after the launch: selections that depend on a layer's queries, and score sinks that
want whole probabilities.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from sparsespec.attention.base import AttentionBackend, AttentionBatch, DenseItem, SparseRows
from sparsespec.attention.derive import derive_items
from sparsespec.attention.fused import FusedAttention, Shape
from sparsespec.attention.items import DeviceViews
from sparsespec.attention.torch_ref import TorchBackend
from sparsespec.config.model import ModelConfig
from sparsespec.core.errors import UnsupportedError
from sparsespec.kernels.rope import write_kv
from sparsespec.kv.pool import KVPool


class TritonBackend(AttentionBackend):
    """See the module. Raises UnsupportedError without a CUDA device, unless Triton interprets its kernels."""

    name = "triton"
    resolves_views = True

    def __init__(self, config: ModelConfig, pool: KVPool, max_drafts: int = 8) -> None:
        super().__init__(config, pool, max_drafts)
        if pool.device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise UnsupportedError("attention_backend", self.name, f"needs a CUDA device, not {pool.device.type}",
                                   "Use 'torch' there, or set TRITON_INTERPRET=1 to test kernels slowly")
        self._ring = max(16, triton.next_power_of_2(max_drafts + 1))
        self._made: dict[tuple[int, int], FusedAttention] = {}

    def _fused(self, views: DeviceViews) -> FusedAttention:
        """The launcher for a page size and a number of slots; an engine has one, made on its first step."""
        key = (views.page_size, views.table.shape[0])
        if key not in self._made:
            c = self.config
            shape = Shape(c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, views.page_size, self._ring)
            self._made[key] = FusedAttention(shape, views.table.shape[0], self.pool.device)
        return self._made[key]

    def plan(self, batch: AttentionBatch) -> None:
        items, views = batch.items, batch.views
        if items is None or views is None:
            items, views = derive_items(batch, self.config, self.pool.device)
        self.batch, self.fused = batch, self._fused(views)
        self.fused.plan(items, views)
        self._reselecting = [part for part in batch.sparse if part.reselect is not None]
        self._sinking = [item for item in batch.dense if item.collect >= 0] if batch.sink is not None else []

    def mean_scores(self, item: int) -> Tensor:
        return self.fused.mean_scores(item)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.pool.k(layer), self.pool.v(layer)
        write_kv(k, v, keys, values, self.batch.entries)
        q = q.to(self.pool.dtype).contiguous()
        out = self.fused.run(layer, q, keys, values)
        for part in self._reselecting:
            out[part.rows] = self._reselected(layer, q[part.rows], part)
        for item in self._sinking:
            self._sink(layer, q, item)
        return out.flatten(1)

    def _grouped(self, q: Tensor) -> Tensor:
        return q.view(-1, self.config.num_kv_heads, self.config.group_size, self.config.head_dim) * self.scale

    def _reselected(self, layer: int, q: Tensor, part: SparseRows) -> Tensor:
        """Outputs like q [n, heads, D] over entries that depend on it."""
        grouped = self._grouped(q)
        entries, valid = part.resolve(layer, grouped)
        head = torch.arange(self.config.num_kv_heads, device=q.device)[:, None]
        keys, values = self.pool.k(layer)[head, entries], self.pool.v(layer)[head, entries]  # [n, KV heads, w, D]
        logits = (grouped @ keys.transpose(-1, -2)).masked_fill(~valid.unsqueeze(2), -torch.inf)
        return (torch.softmax(logits, -1) @ values).view(q.shape)

    def _sink(self, layer: int, q: Tensor, item: DenseItem) -> None:
        if self.batch.sink is None:
            return
        end = item.row + item.rows
        rows = self._grouped(q[end - item.score_rows:end]).permute(1, 2, 0, 3)
        entries = torch.cat([torch.arange(start, start + count, device=q.device) for start, count in item.runs])
        self.batch.sink(layer, item.collect, TorchBackend.probabilities(rows, self.pool.k(layer)[:, entries]))
