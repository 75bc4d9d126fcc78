"""Pages: counted right, neighbours where they can be, whatever order requests come and go in; and the prefix cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsespec.kv.allocator import NO_PAGES, PageAllocator, _largest_gap
from sparsespec.kv.integrity import check_pool
from sparsespec.kv.prefix_cache import PrefixCache, extend_chain
from sparsespec.kv.table import PageTable

SLOTS, PAGES = 6, 40

moves = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 60), st.integers(0, 60)), max_size=60)


def check(table: PageTable) -> None:
    a = table.allocator
    check_pool("device", a, {"slots": table.all_held()})
    assert a._unreserved == ((a.refs == 0) & (a._soft < 0)).sum()
    assert set(a._soft.tolist()) - {-1} <= set(a._hopes)


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
        check(table)
        assert table.allocator.num_free == PAGES - sum(-(-n // page_size) for n in lengths.values())
        for s, n in lengths.items():
            entries = table.positions_to_entries(s, np.arange(n))
            assert len(set(entries.tolist())) == n
            from_runs = np.concatenate([np.arange(a, a + c) for a, c in table.runs(s, n)]) if n else np.zeros(0)
            assert (entries == from_runs).all()


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.lists(st.integers(0, 5), min_size=SLOTS, max_size=SLOTS), max_size=30), page_size=st.sampled_from([1, 4]))
def test_growing_many_at_once(steps: list[list[int]], page_size: int) -> None:
    """All of them or none, and as if one after the other."""
    table = PageTable(SLOTS, 400, page_size, PAGES)
    lengths = np.zeros(SLOTS, np.int32)
    slots = np.arange(SLOTS, dtype=np.int32)
    for more in steps:
        wanted = lengths + np.asarray(more, np.int32)
        fits = int(table.needed(wanted).sum()) <= PAGES
        assert table.grow_all(slots, wanted) == fits
        if fits:
            lengths = wanted
        check(table)
        assert table.counts.tolist() == table.needed(lengths).tolist()


@given(st.lists(st.booleans(), max_size=40))
def test_largest_gap(mask: list[bool]) -> None:
    start, length = _largest_gap(np.array(mask, bool))
    assert all(mask[start:start + length])
    assert length == max((len(run) for run in "".join(".#"[m] for m in mask).split(".")), default=0)


def test_growing_requests_stay_contiguous_beside_each_other() -> None:
    for together in (False, True):
        table = PageTable(4, 64, 1, 256)
        for slot in range(4):
            assert table.grow(slot, 8, expect=64)
        for length in range(9, 65):
            if together:
                assert table.grow_all(np.arange(4, dtype=np.int32), np.full(4, length, np.int32))
            else:
                assert all(table.grow(slot, length) for slot in range(4))
        assert all(len(table.runs(slot, 64)) == 1 for slot in range(4))


def test_two_runs_that_end_in_one_shared_page_part_ways() -> None:
    table = PageTable(2, 64, 4, 16)
    assert table.grow(0, 8, 8)
    table.allocator.share(table.held(0))
    table.adopt(1, table.held(0))
    assert table.grow_all(np.arange(2, dtype=np.int32), np.full(2, 9, np.int32))
    assert table.pages[0, 2] != table.pages[1, 2]
    check(table)
    table.release(0)
    assert table.allocator.num_free == 13
    table.release(1)
    assert table.allocator.num_free == 16


def test_reservations_give_way_when_nothing_else_is_free() -> None:
    allocator = PageAllocator(10)
    assert allocator.allocate(0, 1, expect=10) is not None
    assert allocator.allocate(1, 9) is not None
    assert allocator.num_free == 0
    assert allocator.allocate(1, 1, after=9) is None
    assert allocator.extend(np.array([3], np.int32)) is None


def test_freeing_what_nobody_holds_is_refused() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(0, 2)
    assert pages is not None
    allocator.share(pages[:1])
    allocator.free(pages)
    assert allocator.num_free == 3
    with pytest.raises(ValueError, match="nobody holds"):
        allocator.free(pages)
    with pytest.raises(ValueError, match="free page"):
        allocator.share(pages)
    assert allocator.num_free == 3


def test_check_finds_damage() -> None:
    table = PageTable(2, 8, 1, 8)
    table.grow(0, 3)
    table.grow(1, 2)
    check(table)
    table.pages[0, 1] = table.pages[0, 0]
    with pytest.raises(RuntimeError, match="not held as often as counted"):
        check(table)
    table.pages[0, 1] = table.pages[1, 0]
    with pytest.raises(RuntimeError, match="held by slots 2"):
        check(table)
    allocator = PageAllocator(4)
    allocator.num_free = 3
    with pytest.raises(RuntimeError, match="4 pages are free, the counter says 3"):
        check_pool("device", allocator, {"slots": NO_PAGES})


# -- prefix cache ----------------------------------------------------------------------------------------------------


def chain(tokens: list[int], pages: int, salt: str | None = None) -> list[bytes]:
    out: list[bytes] = []
    extend_chain(out, salt, tokens, 2, pages)
    return out


def test_chains_tell_texts_apart_from_their_first_token_on() -> None:
    tokens = [1, 2, 3, 4, 5, 6]
    whole = chain(tokens, 3)
    assert len(set(whole)) == 3
    assert chain(tokens, 2) == whole[:2]
    assert chain([9, *tokens[1:]], 3)[2] != whole[2]
    assert chain(tokens, 3, "a")[2] != whole[2]
    assert chain([1, 2, 1, 2], 2)[0] != chain([1, 2, 1, 2], 2)[1]
    parts = chain(tokens, 1)
    extend_chain(parts, None, tokens, 2, 3)
    assert parts == whole


def filled() -> tuple[PageAllocator, PrefixCache, list[bytes], np.ndarray]:
    """A cache of three pages that nobody else holds any more."""
    allocator = PageAllocator(8)
    cache = PrefixCache(allocator)
    pages = allocator.allocate(0, 3)
    assert pages is not None
    digests = chain([1, 2, 3, 4, 5, 6], 3)
    cache.insert(digests, pages)
    allocator.free(pages, 0)
    return allocator, cache, digests, pages


def test_prefix_cache_finds_the_longest_beginning() -> None:
    _, cache, digests, pages = filled()
    assert cache.match(digests).tolist() == pages.tolist()
    assert cache.match([*chain([1, 2, 3, 4], 2), b"?", digests[2]]).tolist() == pages[:2].tolist()
    assert cache.match([b"?", *digests]).tolist() == []


def test_what_is_cached_already_stays() -> None:
    allocator, cache, digests, pages = filled()
    twin = allocator.allocate(1, 3)
    assert twin is not None
    cache.insert(digests, twin)
    assert cache.match(digests).tolist() == pages.tolist()
    assert (allocator.refs[twin] == 1).all()


def test_eviction_takes_the_least_recently_used_end_first_and_spares_what_is_held() -> None:
    allocator, cache, digests, pages = filled()
    other = allocator.allocate(0, 2)
    assert other is not None
    fresh = chain([7, 8, 9, 9], 2)
    cache.insert(fresh, other)
    allocator.free(other)
    cache.match(digests[:1])
    assert cache.oldest(9).tolist() == [pages[2], pages[1], other[1], other[0], pages[0]]
    held = cache.match(digests[:2])
    allocator.share(held)
    assert cache.num_evictable == 3
    assert cache.evict(2) == 2
    assert cache.match(digests).tolist() == pages[:2].tolist()
    assert cache.match(fresh).tolist() == other[:1].tolist()
    assert cache.evict(9) == 1
    allocator.free(held)
    cache.clear()
    assert (allocator.num_free, len(cache)) == (8, 0)
