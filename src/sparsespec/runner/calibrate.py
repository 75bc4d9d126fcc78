"""Short measurements that the adaptive draft length starts from: a layer's parts on this device, a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparsespec.attention.base import AttentionBatch, DenseItem, SparseRows
from sparsespec.kv.pool import KVPool
from sparsespec.spec.cost import StepCosts

if TYPE_CHECKING:
    from sparsespec.runner.model_runner import ModelRunner

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_TOKENS = 1024


class _NoAttention:
    """Stands in for attention where only the rest of a layer is timed."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.flatten(1)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = 2) -> float:
    best = float("inf")
    for _ in range(repeats + 1):  # the first warms up
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


@torch.inference_mode()
def measure_costs(runner: ModelRunner) -> StepCosts:
    """Time one layer, the head and the attention forms. Runs on free pages or none: no request's KV is touched."""
    model, device = runner.model, runner.device
    layer, head = [], []
    positions = torch.zeros(_ROWS[-1], dtype=torch.int64, device=device)
    hidden = torch.randn(_ROWS[-1], model.config.hidden_size, device=device).to(model.dtype)
    cos, sin = runner.rotary.tables(positions, model.dtype)
    for rows in _ROWS:
        x, c, s = hidden[:rows], cos[:rows], sin[:rows]
        layer.append(_seconds(lambda x=x, c=c, s=s: model.layers[0](0, x, c, s, _NoAttention()), device))  # type: ignore[misc]
        head.append(_seconds(lambda x=x: model.logits(x), device, 1))  # type: ignore[misc]
    return StepCosts(model.config.num_layers, _ROWS, _rising(layer), _rising(head), *_attention(runner))


def _rising(seconds: list[float]) -> tuple[float, ...]:
    """No more for fewer rows than for more: what exceeds that was somebody else's load."""
    return tuple(np.minimum.accumulate(seconds[::-1])[::-1].tolist())


def _attention(runner: ModelRunner) -> tuple[tuple[float, float, float], tuple[float, float], float]:
    c, device, pool = runner.pool.config, runner.device, runner.pool
    rows = runner.max_drafts + 1
    scratch = KVPool(replace(c, num_layers=1), min(_TOKENS, pool.entries), pool.dtype, device)
    scratch.data.normal_()
    length = scratch.entries
    backend = type(runner.backend)(scratch.config, scratch)
    q = torch.randn(rows, c.num_heads, c.head_dim, device=device).to(pool.dtype)
    kv = torch.randn(rows, c.num_kv_heads, c.head_dim, device=device).to(pool.dtype)

    def dense(n: int, tokens: int) -> float:
        entries = torch.arange(tokens - n, tokens, device=device)
        backend.plan(AttentionBatch(entries, [], [DenseItem(0, n, tokens, [(0, tokens)])]))
        return _seconds(lambda: backend.run(0, q[:n], kv[:n], kv[:n]), device)

    def sparse(n: int, width: int) -> float:
        positions = torch.randint(0, length, (1, 1, c.num_kv_heads, width), device=device, dtype=torch.int32)
        last, table = torch.full((n,), length - 1, device=device), torch.arange(length, device=device, dtype=torch.int32)[None]
        view = SparseRows(slice(0, n), torch.zeros(n, dtype=torch.int64, device=device), last, last, positions,
                          torch.full(positions.shape[:3], width, device=device, dtype=torch.int32), table, 1, width, 1, scratch)
        backend.plan(AttentionBatch(torch.arange(n, device=device), [view], []))
        return _seconds(lambda: backend.run(0, q[:n], kv[:n], kv[:n]), device)

    short = max(min(rows + 1, length), length // 16)
    one, few, many = dense(1, length), dense(1, short), dense(min(rows, short), length)
    token = max(one - few, 0.0) / max(length - short, 1)
    per_row = max(many - one, 0.0) / (length * max(min(rows, short) - 1, 1))
    width = max(1, min(256, length // 2))
    wide, narrow = sparse(rows, width), sparse(rows, max(1, width // 8))
    entry = max(wide - narrow, 0.0) / (rows * max(width - width // 8, 1))
    scores = torch.rand(c.num_kv_heads, length, device=device)
    select = _seconds(lambda: scores.topk(max(1, length // 8), -1, sorted=False), device) / length
    return (max(few - token * short, 0.0), token, per_row), (max(narrow - entry * rows * width / 8, 0.0), entry), select
