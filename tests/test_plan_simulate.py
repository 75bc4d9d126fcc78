"""The simulators: conservation, the fluid engine against the real scheduler, fleets, and the paper's directions."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsespec.core.errors import CapacityError, UnsupportedError
from sparsespec.plan.costs import CostModel, Gpu, load_model
from sparsespec.plan.exact import run_exact
from sparsespec.plan.fleet import Router, run_fluid
from sparsespec.plan.options import POLICIES, ROUTERS, DraftOptions, LoadOptions, SystemOptions
from sparsespec.plan.replica import Lengths, Replica
from sparsespec.plan.report import Report
from sparsespec.plan.rounds import Rounds
from sparsespec.plan.study import Lab, ablation, figure5
from sparsespec.plan.workload import Load, make_load

COSTS = CostModel(Gpu.load("h200"), load_model("qwen3-8b"))
DRAFT = DraftOptions()
SMALL = make_load(LoadOptions(requests=64, mean_output_len=300.0))
AIME = make_load(LoadOptions())


def system(**changes: Any) -> SystemOptions:
    return SystemOptions(**{"verification": "sync", "kv_cache_tokens": 5000, "max_num_seqs": 32, **changes})


def check(r: Report, load: Load) -> None:
    """What holds in every simulation."""
    assert r.requests == len(load)
    assert r.output_tokens == load.outputs.sum()
    assert 0 < r.pool_use <= 1
    assert r.pool_use_loaded is None or 0 < r.pool_use_loaded <= 1
    assert 0 < r.mean_running <= r.system.max_num_seqs
    assert 0 < r.latency_p50 <= r.latency_p99 <= r.seconds
    policy = r.system.kv_policy
    assert (r.recomputed_tokens > 0) == (policy == "recompute" and r.preemptions > 0)
    assert (r.offloaded_tokens > 0) == (policy == "offload" and r.preemptions > 0)
    assert policy != "reserve" or r.preemptions == 0


@pytest.mark.parametrize("method", ["pillar", "none"])
@pytest.mark.parametrize("policy", POLICIES)
def test_fluid_is_close_to_the_real_scheduler(policy: str, method: str) -> None:
    s = system(kv_policy=policy, method=method)
    fluid, exact = run_fluid(SMALL, COSTS, DRAFT, s), run_exact(SMALL, COSTS, DRAFT, s)
    check(fluid, SMALL)
    check(exact, SMALL)
    assert fluid.throughput == pytest.approx(exact.throughput, rel=0.05)
    assert fluid.gemm_rows_mean == pytest.approx(exact.gemm_rows_mean, rel=0.05)
    if policy != "offload":  # there the two take other victims, so that other requests wait, and another tail is left
        assert fluid.latency_p50 == pytest.approx(exact.latency_p50, rel=0.08)
        assert fluid.pool_use == pytest.approx(exact.pool_use, rel=0.05)


def test_both_engines_see_the_schedules_rows() -> None:
    """Lockstep swings by the same amount in both; the real scheduler keeps unified iterations within a tenth."""
    load = make_load(LoadOptions(requests=40, mean_output_len=800.0, std_output_len=0.0))
    runs = {}
    for schedule in ("unified", "lockstep"):
        s = system(schedule=schedule, kv_policy="reserve", kv_cache_tokens=60_000, max_num_seqs=48)
        runs[schedule] = run_fluid(load, COSTS, DRAFT, s), run_exact(load, COSTS, DRAFT, s)
    fluid, exact = runs["lockstep"]
    assert fluid.gemm_rows_std == pytest.approx(exact.gemm_rows_std, rel=0.1)
    assert fluid.gemm_rows_std > fluid.gemm_rows_mean
    fluid, exact = runs["unified"]
    assert fluid.gemm_rows_std is None
    assert exact.gemm_rows_std is not None
    assert exact.gemm_rows_std < 0.1 * exact.gemm_rows_mean


@settings(max_examples=150, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 400)), min_size=1, max_size=40),
       policy=st.sampled_from(POLICIES), verification=st.sampled_from(["sync", "delayed", "device"]), k=st.integers(1, 12),
       plain=st.booleans(), slots=st.integers(1, 20), room=st.integers(0, 600), rate=st.sampled_from([0.0, 0.5, 5.0]),
       replicas=st.integers(1, 3), router=st.sampled_from(ROUTERS))
def test_conservation(shapes: list[tuple[int, int]], policy: str, verification: str, k: int, plain: bool, slots: int, room: int,
                      rate: float, replicas: int, router: str) -> None:
    """Any load: every request ends, with its length, and the pool is empty afterwards."""
    prompts, outputs = (np.array(column, np.int64) for column in zip(*shapes, strict=True))
    rng = np.random.default_rng(len(shapes))
    arrivals = np.cumsum(rng.exponential(1 / rate, len(shapes))) if rate else np.zeros(len(shapes))
    load = Load(prompts, outputs, arrivals)
    s = SystemOptions(method="none" if plain else "pillar", verification=verification, kv_policy=policy, max_num_seqs=slots,
                      kv_cache_tokens=int((prompts + outputs).max()) + room, replicas=replicas, router=router)
    r = run_fluid(load, COSTS, DraftOptions(num_speculative_tokens=k), s)
    assert r.requests == len(shapes)
    assert 0 < r.pool_use <= 1 + 1e-9
    assert r.seconds >= arrivals[-1]
    assert r.restored_tokens == pytest.approx(r.offloaded_tokens, abs=2 * r.preemptions)
    assert r.recomputed_tokens == 0 or policy == "recompute"
    assert r.slot_use == pytest.approx((k + 1) / (k + 2) if verification == "delayed" and not plain else 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replica_gives_every_request_its_tokens_and_all_room_back(policy: str) -> None:
    rounds = Rounds(COSTS, DRAFT, system(), 5000)
    finished = [0.0] * len(SMALL)
    replica = Replica(Lengths.of(SMALL), rounds, 5000, 32, policy, None, finished)
    for i in range(len(SMALL)):
        replica.arrive(i, 0.0)
    while replica.next_event() < float("inf"):
        before = replica.now
        replica.fire()
        assert replica.now >= before
        assert replica.kv <= 5000 * (1 + 1e-6)
        assert len(replica.running) <= 32
    assert replica.requests == 0
    assert replica.kv == pytest.approx(0, abs=1e-3)
    assert replica.held == pytest.approx(0, abs=1e-3)
    assert replica.reserved == 0
    assert min(finished) > 0
    gained = replica.meter.slot_iterations * rounds.tokens / rounds.iterations
    assert gained == pytest.approx(SMALL.outputs.sum(), rel=0.03)  # while a copy returns its request counts as running
    assert gained >= SMALL.outputs.sum() * (1 - 1e-9)


def test_the_same_seed_gives_the_same_report() -> None:
    few = make_load(LoadOptions(requests=24, mean_output_len=120.0))
    for run in (run_fluid, run_exact):
        s = system(kv_policy="offload", kv_cache_tokens=2000)
        assert run(few, COSTS, DRAFT, s, "a", 3) == run(few, COSTS, DRAFT, s, "a", 3)
    s = system(replicas=3, router="two_choices")
    assert run_fluid(SMALL, COSTS, DRAFT, s, "a", 3) == run_fluid(SMALL, COSTS, DRAFT, s, "a", 3)


def test_requests_that_no_pool_holds_are_refused() -> None:
    load = Load(np.array([10]), np.array([4991]), np.zeros(1))
    for run in (run_fluid, run_exact):
        with pytest.raises(CapacityError, match="5001"):
            run(load, COSTS, DRAFT, system())
    with pytest.raises(CapacityError, match="9010"):
        run_fluid(load, COSTS, DRAFT, system(reserve_tokens=9000, kv_policy="reserve"))


@pytest.mark.parametrize("changes", [{"verification": "delayed"}, {"replicas": 2}, {"reserve_tokens": 500, "kv_policy": "reserve"}])
def test_the_exact_engine_refuses_what_it_can_not(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        run_exact(SMALL, COSTS, DRAFT, system(**changes))


def test_verification_modes_cost_what_they_should() -> None:
    """With the CPU free, delayed loses by its stalled slots and the others are equal; with it slow, sync loses most."""
    def speeds(base: float) -> dict[str, float]:
        costs = CostModel(replace(Gpu.load("h200"), cpu_ms={"base": base, "per_request": 0.0}), load_model("qwen3-8b"))
        return {v: run_fluid(SMALL, costs, DRAFT, system(verification=v)).throughput for v in ("sync", "delayed", "device")}

    free, slow = speeds(0.0), speeds(5.0)
    assert free["sync"] == pytest.approx(free["device"])
    assert free["delayed"] < free["device"]
    assert slow["sync"] < slow["delayed"] < slow["device"]
    assert slow["device"] == pytest.approx(free["device"])


def test_figure_5_and_the_ablation_have_the_papers_direction() -> None:
    lab = Lab(AIME, COSTS, DRAFT, SystemOptions(), 32768, 0, lambda name: None)
    longest, oracle, recompute, offload = figure5(lab).groups["KV policies"]
    for r in (longest, oracle, recompute, offload):
        check(r, AIME)
    assert longest.pool_use < 0.3 < oracle.pool_use < 0.55
    assert min(recompute.pool_use, offload.pool_use) > 0.9
    assert offload.pool_use_loaded is not None
    assert offload.pool_use_loaded >= 0.97
    assert recompute.recomputed_share > 0.2
    assert offload.recomputed_tokens == 0
    assert longest.throughput < oracle.throughput < recompute.throughput < offload.throughput
    factors = ablation(lab).factors
    assert all(f.factor > 1.0 for f in factors)
    assert {f.name: f.paper for f in factors if f.paper} == {
        "unified scheduler": 1.23, "KV manager": 1.61, "delayed verification": 1.12, "together": 2.22}


@pytest.fixture(scope="module")
def steady() -> Load:
    return make_load(LoadOptions(requests=2000, mean_output_len=2000.0, request_rate=10.0))


@pytest.mark.parametrize("router", ROUTERS)
def test_routers(router: str, steady: Load) -> None:
    r = run_fluid(steady, COSTS, DRAFT, SystemOptions(replicas=6, router=router, kv_cache_tokens=60_000))
    check(replace(r, system=replace(r.system, max_num_seqs=10**6)), steady)
    one = run_fluid(steady, COSTS, DRAFT, SystemOptions(router=router))
    assert one.throughput == run_fluid(steady, COSTS, DRAFT, SystemOptions()).throughput


def test_looking_at_the_load_beats_chance(steady: Load) -> None:
    """At a load that fills a pool now and then, uneven fleets swap more."""
    runs = {router: run_fluid(steady, COSTS, DRAFT, SystemOptions(replicas=6, router=router, kv_cache_tokens=60_000))
            for router in ROUTERS}
    assert runs["least_requests"].preemptions < runs["two_choices"].preemptions < runs["random"].preemptions
    assert runs["least_requests"].latency_p99 < runs["random"].latency_p99


def test_routers_choose_as_named() -> None:
    rounds = Rounds(COSTS, DRAFT, system(), 6000)
    load = Lengths([10, 10, 10], [2000, 10, 10])
    replicas = [Replica(load, rounds, 6000, 4, "offload", None, [0.0] * 3) for _ in range(3)]
    turn = Router("round_robin", 3, 0)
    assert [turn.choose() for _ in range(5)] == [0, 1, 2, 0, 1]
    least = {name: Router(name, 3, 0) for name in ("least_requests", "least_kv")}
    assert [r.choose() for r in least.values()] == [0, 0]
    for i in range(2):
        replicas[i].arrive(i, 0.0)
        for r in least.values():
            r.update(i, replicas[i])
    assert [r.choose() for r in least.values()] == [2, 2]
    replicas[2].arrive(2, 0.0)
    replicas[0].next_event()
    replicas[0].fire()  # its one request ends
    for r in least.values():
        r.update(0, replicas[0])
        r.update(2, replicas[2])
    assert [r.choose() for r in least.values()] == [0, 0]


@pytest.mark.slow
def test_a_million_requests_take_less_than_a_minute() -> None:
    load = make_load(LoadOptions(requests=1_000_000, request_rate=22.0))
    begun = time.process_time()
    r = run_fluid(load, COSTS, DRAFT, SystemOptions(replicas=64, router="least_requests"))
    assert time.process_time() - begun < 60
    check(replace(r, system=replace(r.system, max_num_seqs=10**6)), load)
