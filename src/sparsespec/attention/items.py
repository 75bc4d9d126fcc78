"""A step's items as arrays, for attention backends that resolve every view by themselves on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Items:
    """Arrays [items] on the host, in the order of the items' rows.

    slots: row of the page table and of the selections. starts: position of the first query row. rows: query rows. sparse: sees
    the slot's selection and every position from tails on, else all positions. widths: the most entries that the selection has.
    score_rows: how many of the last rows have their mean probabilities kept, 0 for none. refs: how many of the item's first
    rows were drafts' rows in this round, whose LSE is known (0: scores take a second reading of K).
    """

    slots: Ints
    starts: Ints
    rows: Ints
    sparse: npt.NDArray[np.bool_]
    tails: Ints
    widths: Ints
    score_rows: Ints
    refs: Ints

    @staticmethod
    def build(slots: npt.ArrayLike, starts: npt.ArrayLike, rows: npt.ArrayLike, **given: npt.ArrayLike) -> Items:
        """From what is given; the rest says full views without scores."""
        n = np.asarray(slots).shape[0]
        filled = {**{name: np.zeros(n) for name in ("sparse", "tails", "widths", "score_rows", "refs")}, **given}
        arrays = {name: np.asarray(a).astype(bool if name == "sparse" else np.int32) for name, a in filled.items()}
        return Items(np.asarray(slots, np.int32), np.asarray(starts, np.int32), np.asarray(rows, np.int32), **arrays)


@dataclass(frozen=True)
class DeviceViews:
    """What items' views are resolved with: table [slots, pages] int32 (position p of a slot lies at entry
    table[slot, p // page_size] * page_size + p % page_size), and the selections: positions [slots, layers, KV heads, width]
    int32, of which counts [slots, layers, KV heads] int32 hold."""

    table: Tensor
    page_size: int
    positions: Tensor
    counts: Tensor
