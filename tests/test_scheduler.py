"""The scheduler alone, driven by a made-up device: no model, no torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsespec.config.engine import SchedulerConfig
from sparsespec.core.plan import StepPlan, StepResult
from sparsespec.core.request import DraftTraits, Request
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.kv.table import PageTable
from sparsespec.scheduler.kv_policy import make_kv_policy
from sparsespec.scheduler.memory import Memory
from sparsespec.scheduler.phases import make_phases
from sparsespec.scheduler.scheduler import Scheduler

SELECTS = DraftTraits(0, 64, selects=True)


def request(name: str, prompt: int, output: int, stop: frozenset[int] = frozenset(), traits: DraftTraits = SELECTS) -> Request:
    ids = list(range(1, prompt + 1))
    return Request(name, ids, SamplingParams(max_tokens=output), 0, False, prompt + output, stop, frozenset(), traits=traits)


def scheduler(*, slots: int = 8, k: int = 4, pages: int = 4096, max_rows: int = 64, schedule: str = "unified",
              reserve: bool = False) -> Scheduler:
    memory = Memory(PageTable(slots, 4096, 4, pages), round_tokens=k + 1)
    policy = make_kv_policy("reserve" if reserve else "recompute", host=False)
    return Scheduler(SchedulerConfig(max_num_seqs=slots), max_rows, memory, policy, make_phases(schedule, k, slots), k,
                     lambda policy: k)


def device(plan: StepPlan, rng: np.random.Generator, rate: float = 0.7, token: int = 99) -> StepResult:
    """Accepts each draft with chance `rate`."""
    items = np.flatnonzero(plan.emit)
    drafted = plan.drafted[items]
    width = int(drafted.max(initial=0)) + 1
    kept = (rng.random((len(items), width)) < rate) & (np.arange(width) < drafted[:, None])
    accepted = np.cumprod(kept, 1).sum(1)
    return StepResult(items.astype(np.int32), np.full((len(items), width), token), (accepted + 1).astype(np.int32),
                      np.zeros(len(items), bool))


def drain(s: Scheduler, rng: np.random.Generator, steps: int = 5000) -> list[StepPlan]:
    plans = []
    while s.has_work():
        plan = s.schedule()
        assert plan is not None
        plans.append(plan)
        assert len(plans) < steps, "no end in sight"
        for c in s.commit(plan, device(plan, rng)):
            if c.finish_reason:
                s.finish(c.request)
        s.check()
    return plans


@settings(max_examples=60, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=14), k=st.integers(1, 9),
       pages=st.integers(34, 120), max_rows=st.sampled_from([1, 7, 64]), schedule=st.sampled_from(["unified", "lockstep"]),
       reserve=st.booleans(), seed=st.integers(0, 1000))
def test_everybody_finishes_with_exactly_what_was_asked(shapes: list[tuple[int, int]], k: int, pages: int, max_rows: int,
                                                        schedule: str, reserve: bool, seed: int) -> None:
    """Any load, pool pressure included: exact lengths, no row past the limit, pages all back, integrity after each step."""
    s = scheduler(k=k, pages=pages, max_rows=max_rows, schedule=schedule, reserve=reserve)
    requests = [request(str(i), p, o) for i, (p, o) in enumerate(shapes)]
    for r in requests:
        s.add(r)
    limits = {id(r): r.limit for r in requests}
    rng = np.random.default_rng(seed)
    while s.has_work():
        plan = s.schedule()
        assert plan is not None
        assert (plan.starts + plan.rows <= s.limit[plan.slots]).all()
        assert (plan.sparse[:plan.num_sparse]).all()
        assert len(set(plan.slots.tolist())) == plan.num_items
        assert s.now < 20000
        for c in s.commit(plan, device(plan, rng)):
            if c.finish_reason:
                s.finish(c.request)
        s.check()
    assert [len(r.output_token_ids) for r in requests] == [o for _, o in shapes]
    assert all(r.num_tokens == limits[id(r)] for r in requests)
    assert s.memory.num_free == s.memory.pages.allocator.num_pages
    assert s.counters.num_emitted_tokens == sum(o for _, o in shapes)
    if reserve:
        assert s.counters.num_preemptions == 0


@settings(max_examples=60, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=14), k=st.integers(0, 9),
       pages=st.integers(34, 120), max_rows=st.sampled_from([1, 7, 64]), schedule=st.sampled_from(["unified", "lockstep"]),
       assumes=st.booleans(), leaves=st.sets(st.integers(0, 60)), seed=st.integers(0, 1000))
def test_results_that_come_one_step_late(shapes: list[tuple[int, int]], k: int, pages: int, max_rows: int, schedule: str,
                                         assumes: bool, leaves: set[int], seed: int) -> None:
    """A step is always under way when the next one is planned. Some requests are aborted; all others get what they asked for."""
    s = scheduler(k=k, pages=pages, max_rows=max_rows, schedule=schedule)
    s.assumes = assumes
    requests = [request(str(i), p, o) for i, (p, o) in enumerate(shapes)]
    for r in requests:
        s.add(r)
    rng = np.random.default_rng(seed)
    flight: list[StepPlan] = []
    gone: set[Request] = set()
    for step in range(20000):
        if not s.has_work():
            break
        plan = s.schedule()
        if plan is not None:
            assert (plan.starts + plan.rows <= s.limit[plan.slots]).all()
            assert len(set(plan.slots.tolist())) == plan.num_items
            assert not plan.assumed.any() or assumes
            s.launch(plan)
            flight.append(plan)
        if len(flight) > 1 or plan is None:
            done = flight.pop(0)
            for c in s.commit(done, device(done, rng)):
                assert c.request not in gone
                if c.finish_reason:
                    s.finish(c.request)
        running = [r for r in requests if r not in gone and len(r.output_token_ids) < r.params.max_tokens]  # type: ignore[operator]
        if step in leaves and running:
            gone.add(running[step % len(running)])
            s.finish(running[step % len(running)])
        s.check()
    assert not s.has_work()
    assert not flight
    assert all(len(r.output_token_ids) == o for r, (_, o) in zip(requests, shapes, strict=True) if r not in gone)
    assert s.memory.num_free == s.memory.pages.allocator.num_pages
    assert s.counters.num_stalled_slots == 0 or not assumes


@pytest.mark.parametrize("k", [4, 8])
def test_unified_iterations_are_alike_and_lockstep_ones_are_not(k: int) -> None:
    """GEMM rows at steady load within 10 % of their mean, though all requests start at once and end at different times."""
    spread = {}
    for schedule in ("unified", "lockstep"):
        s = scheduler(slots=180, k=k, pages=60000, max_rows=4096, schedule=schedule)
        rng = np.random.default_rng(1)
        for i in range(180):
            s.add(request(str(i), 4, int(rng.integers(400, 3000))))
        rows = []
        for step in range(700):
            plan = s.schedule()
            assert plan is not None
            if step > 40:
                rows.append(plan.num_rows)
            for c in s.commit(plan, device(plan, rng)):
                if c.finish_reason:
                    s.finish(c.request)
                    s.add(request("next" + c.request.request_id, 1, int(rng.integers(400, 3000))))
        mean = np.mean(rows)
        spread[schedule] = np.quantile(np.abs(np.array(rows) / mean - 1), 0.95)
    assert spread["unified"] <= 0.10
    assert spread["lockstep"] > 0.5


def test_buckets_fill_again_when_requests_end() -> None:
    s = scheduler(slots=90, k=8, pages=60000, max_rows=4096)
    rng = np.random.default_rng(0)
    for i in range(90):
        s.add(request(str(i), 4, 3000))

    def run(steps: int) -> list[int]:
        verified = []
        for _ in range(steps):
            plan = s.schedule()
            assert plan is not None
            verified.append(int(plan.emit.sum()))
            s.commit(plan, device(plan, rng))
        return verified

    run(20)
    for day in range(4):  # empty four of the nine buckets
        plan = s.schedule()
        assert plan is not None
        leaving = [s.requests[slot] for slot in plan.slots[plan.emit]]
        s.commit(plan, device(plan, rng))
        for r in leaving:
            assert r is not None
            s.finish(r)
        assert len(leaving) >= 9, day
    settled = run(40)[-18:]
    assert max(settled) - min(settled) <= 1


def test_prefill_never_starves_decoding_nor_the_reverse() -> None:
    s = scheduler(slots=4, k=4, max_rows=16)
    s.add(request("short", 4, 100))
    rng = np.random.default_rng(0)
    for _ in range(3):
        plan = s.schedule()
        assert plan is not None
        s.commit(plan, device(plan, rng))
    s.add(request("long", 600, 4))
    for _ in range(15):
        plan = s.schedule()
        assert plan is not None
        chunk = plan.rows[~plan.sparse & ~plan.emit]
        assert len(plan.slots) == 2
        assert chunk.sum() >= 1
        assert plan.num_rows <= 16 + 4
        s.commit(plan, device(plan, rng))


def test_no_draft_before_the_prompt_is_computed_and_the_first_round_is_full() -> None:
    s = scheduler(slots=1, k=4, max_rows=8)
    s.add(request("a", 30, 40))
    rng = np.random.default_rng(0)
    seen: list[tuple[int, bool, bool]] = []
    for _ in range(10):
        plan = s.schedule()
        assert plan is not None
        seen.append((int(plan.rows[0]), bool(plan.sparse[0]), bool(plan.emit[0])))
        s.commit(plan, device(plan, rng))
    assert seen[:4] == [(8, False, False)] * 3 + [(6, False, True)]
    assert seen[4:9] == [(1, True, False)] * 4 + [(5, False, True)]


def test_waiting_requests_keep_their_order() -> None:
    s = scheduler(slots=2, k=2, pages=30)
    names = [str(i) for i in range(12)]
    for name in names:
        s.add(request(name, 8, 12))
    started: list[str] = []
    rng = np.random.default_rng(3)
    while s.has_work():
        plan = s.schedule()
        assert plan is not None
        started += [r.request_id for r in s.admitted]
        s.admitted.clear()
        for c in s.commit(plan, device(plan, rng)):
            if c.finish_reason:
                s.finish(c.request)
    assert list(dict.fromkeys(started)) == names


@settings(max_examples=100, deadline=None)
@given(schedule=st.sampled_from(["unified", "lockstep"]), k=st.integers(1, 9), batches=st.lists(st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 11)), min_size=1, max_size=12), min_size=1, max_size=8))
def test_rounds_that_begin_together_choose_as_one_by_one(schedule: str, k: int, batches: list[list[tuple[int, int]]]) -> None:
    """Each sees the load that those before it made, and none the rounds that ended with it."""
    together, alone = make_phases(schedule, k, 12), make_phases(schedule, k, 12)
    for now, batch in enumerate(batches):
        most_of = {slot: min(most, k) for most, slot in batch}
        slots, most = np.array(list(most_of)), np.array(list(most_of.values()))
        alone.end(slots)
        one_by_one = [int(alone.begin(now, slots[i:i + 1], most[i:i + 1])[0]) for i in range(len(slots))]
        assert together.begin(now, slots, most).tolist() == one_by_one
        assert all(d <= m for d, m in zip(one_by_one, most.tolist(), strict=True))


def test_unified_takes_the_least_loaded_bucket_and_a_full_round_among_equals() -> None:
    phases = make_phases("unified", 3, 9)
    assert phases.begin(0, np.arange(6), np.full(6, 3)).tolist() == [3, 2, 1, 0, 3, 2]
    phases.due(0, np.array([6, 7]))  # verify at once, beside the one with no draft
    assert phases.begin(0, np.array([8]), np.array([1])).tolist() == [1]
    phases.end(np.array([0, 4]))
    assert phases.begin(0, np.array([0, 4]), np.array([3, 3])).tolist() == [3, 3]


def test_stop_ids_end_a_block_where_they_stand() -> None:
    for offset in range(5):
        s = scheduler(slots=1, k=4)
        s.add(request("a", 4, 40, frozenset({7})))
        for _ in range(2):
            plan = s.schedule()
            assert plan is not None
            while not plan.emit.any():
                s.commit(plan, device(plan, np.random.default_rng(0)))
                plan = s.schedule()
                assert plan is not None
            width = int(plan.drafted[0]) + 1
            tokens = np.full((1, width), 9)
            if width == 5:
                tokens[0, offset] = 7
            commits = s.commit(plan, StepResult(np.array([0], np.int32), tokens, np.array([width], np.int32), np.array([False])))
        assert commits[0].tokens == [9] * offset + [7]
        assert commits[0].finish_reason == "stop"
        assert commits[0].stop_token == 7
        assert s.counters.num_accepted_tokens == min(offset + 1, 4)
        assert s.counters.accepted_per_position == [1] * min(offset + 1, 4) + [0] * (4 - min(offset + 1, 4))
