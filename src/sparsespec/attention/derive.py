"""Items and device views from a batch that came without them, as tests and calibration make it. Waits for the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsespec.attention.base import AttentionBatch, SparseRows
from sparsespec.attention.items import DeviceViews, Items
from sparsespec.config.model import ModelConfig


def derive_items(batch: AttentionBatch, config: ModelConfig, device: torch.device) -> tuple[Items, DeviceViews]:
    """One item a sparse row, one a dense item, each with a slot of its own; pages of one entry."""
    firsts: list[tuple[int, int, int]] = []  # (row in the batch, rows, position of its first)
    entries: list[Tensor] = []
    tails, widths, chosen = [], [], []
    for part in batch.sparse:
        rows = np.arange(len(batch.entries))[part.rows if isinstance(part.rows, slice) else part.rows.cpu().numpy()]
        for i, (row, last) in enumerate(zip(rows.tolist(), part.last.tolist(), strict=True)):
            firsts.append((row, 1, last))
            entries.append(_entries(part, i, last + 1))
            selected = part.reselect is None
            tails.append(int(part.tail[i]) if selected else last)
            widths.append(part.width if selected else 0)
            chosen.append((part, int(part.slots[i])) if selected else None)
    sparse = len(firsts)
    for item in batch.dense:
        firsts.append((item.row, item.rows, item.kv_len - item.rows))
        entries.append(torch.cat([torch.arange(start, start + count) for start, count in item.runs]))
        tails.append(0)
        widths.append(0)
        chosen.append(None)
    table = torch.zeros(len(firsts), max(map(len, entries)), dtype=torch.int32)
    for line, own in zip(table, entries, strict=True):
        line[:len(own)] = own
    shape = (len(firsts), config.num_layers, config.num_kv_heads)
    positions = torch.zeros(*shape, max(1, *widths), dtype=torch.int32)
    counts = torch.zeros(shape, dtype=torch.int32)
    for i, source in enumerate(chosen):
        if source is not None:
            part, slot = source
            positions[i, :, :, :part.width] = part.positions[slot, :, :, :part.width].cpu()
            counts[i] = part.counts[slot].cpu()
    order = np.argsort([row for row, _, _ in firsts])
    _, rows_of, starts = np.array(firsts).T
    items = Items.build(order, starts[order], rows_of[order], sparse=order < sparse, tails=np.array(tails)[order],
                        widths=np.array(widths)[order])
    return items, DeviceViews(table.to(device), 1, positions.to(device), counts.to(device))


def _entries(part: SparseRows, i: int, length: int) -> Tensor:
    position = torch.arange(length)
    return part.table[int(part.slots[i])].cpu()[position // part.page_size] * part.page_size + position % part.page_size
