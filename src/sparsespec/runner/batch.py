"""From a step plan to the tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsespec.attention.base import DenseItem
from sparsespec.core.plan import StepPlan
from sparsespec.kv.table import PageTable


@dataclass(frozen=True)
class InputBatch:
    """Rows of a step, item after item. slots, positions, entries [N] int64 on the device; first [items] first row.

    logit_rows: rows whose logits are wanted: all of the sparse items', then each emitting item's. first_logit: for each
    emitting item, the index in logit_rows of its first.
    """

    slots: Tensor
    positions: Tensor
    entries: Tensor
    first: np.ndarray
    logit_rows: Tensor
    emitting: np.ndarray
    first_logit: np.ndarray


def spread(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenation of start, start + 1, … with each count: [sum(counts)] int64."""
    ends = np.cumsum(counts)
    offsets = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(starts.astype(np.int64), counts) + offsets


def build_batch(plan: StepPlan, pages: PageTable, device: torch.device) -> InputBatch:
    """Array operations over the whole plan; no loop over rows."""
    rows = plan.rows.astype(np.int64)
    first = np.cumsum(rows) - rows
    slots = np.repeat(plan.slots.astype(np.int64), rows)
    positions = spread(plan.starts, rows)
    page, offset = np.divmod(positions, pages.page_size)
    entries = pages.pages[slots, page].astype(np.int64) * pages.page_size + offset
    emitting = np.flatnonzero(plan.emit)
    wanted = plan.drafted[emitting].astype(np.int64) + 1
    drafts = plan.num_sparse_rows
    first_logit = drafts + np.cumsum(wanted) - wanted
    logit_rows = np.concatenate([np.arange(drafts), spread((first + rows)[emitting] - wanted, wanted)])

    def to(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return InputBatch(to(slots), to(positions), to(entries), first, to(logit_rows), emitting, first_logit)


def dense_items(plan: StepPlan, batch: InputBatch, pages: PageTable, scored: dict[int, int]) -> list[DenseItem]:
    """The full views of a plan. scored: item → rows to score; these items collect, numbered in its order."""
    numbers = {item: number for number, item in enumerate(scored)}
    items = []
    for i in range(plan.num_sparse, plan.num_items):
        end, slot = int(plan.starts[i] + plan.rows[i]), int(plan.slots[i])
        items.append(DenseItem(int(batch.first[i]), int(plan.rows[i]), end, pages.runs(slot, end), numbers.get(i, -1),
                               scored.get(i, 0)))
    return items
