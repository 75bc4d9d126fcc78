"""Pages: owned once, counted right, neighbours where they can be, whatever order requests come and go in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsespec.kv.allocator import PageAllocator
from sparsespec.kv.table import PageTable

SLOTS, PAGES = 6, 40

moves = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 60), st.integers(0, 60)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(moves=moves, page_size=st.sampled_from([1, 3, 16]))
def test_table_against_a_plain_model(moves: list[tuple[int, int, int]], page_size: int) -> None:
    """Each move grows a slot to a length, or frees it at length 0; a dictionary of sets is the model."""
    table = PageTable(SLOTS, 60 * page_size, page_size, PAGES)
    lengths = dict.fromkeys(range(SLOTS), 0)
    for slot, length, expect in moves:
        if length == 0:
            table.release(slot)
            lengths[slot] = 0
        else:
            held = {s: -(-n // page_size) for s, n in lengths.items()}
            want = -(-length // page_size)
            fits = want - held[slot] <= PAGES - sum(held.values())
            assert table.grow(slot, length, expect) == fits
            if fits:
                lengths[slot] = max(lengths[slot], length)
        table.check()
        assert table.allocator.num_free == PAGES - sum(-(-n // page_size) for n in lengths.values())
        for s, n in lengths.items():
            entries = table.positions_to_entries(s, np.arange(n))
            assert len(set(entries.tolist())) == n
            from_runs = np.concatenate([np.arange(a, a + c) for a, c in table.runs(s, n)]) if n else np.zeros(0)
            assert (entries == from_runs).all()


def test_growing_requests_stay_contiguous_beside_each_other() -> None:
    table = PageTable(4, 64, 1, 256)
    for slot in range(4):
        assert table.grow(slot, 8, expect=64)
    for length in range(9, 65):
        for slot in range(4):
            assert table.grow(slot, length)
    assert all(len(table.runs(slot, 64)) == 1 for slot in range(4))


def test_reservations_give_way_when_nothing_else_is_free() -> None:
    allocator = PageAllocator(10)
    assert allocator.allocate(0, 1, expect=10) is not None
    assert allocator.allocate(1, 9) is not None
    assert allocator.num_free == 0
    assert allocator.allocate(1, 1, after=9) is None


def test_freeing_what_is_not_owned_is_refused() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(0, 2)
    assert pages is not None
    with pytest.raises(ValueError, match="does not own"):
        allocator.free(1, pages)
    allocator.free(0, pages)
    with pytest.raises(ValueError, match="does not own"):
        allocator.free(0, pages)


def test_check_finds_damage() -> None:
    table = PageTable(2, 8, 1, 8)
    table.grow(0, 3)
    table.pages[0, 1] = table.pages[0, 0]
    with pytest.raises(RuntimeError, match="twice"):
        table.check()
    allocator = PageAllocator(4)
    allocator.num_free = 3
    with pytest.raises(RuntimeError, match="accounting"):
        allocator.check()
