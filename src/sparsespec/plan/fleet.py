"""The fluid engine: replicas behind a router, one event after the other.

A million requests take about three events each, so an event has to cost microseconds: plain Python numbers and heaps.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable
from itertools import cycle
from operator import attrgetter

import numpy as np

from sparsespec.plan.costs import CostModel
from sparsespec.plan.options import DraftOptions, SystemOptions
from sparsespec.plan.replica import NEVER, Lengths, Replica
from sparsespec.plan.report import Report, latencies
from sparsespec.plan.rounds import Rounds
from sparsespec.plan.workload import Load


class Router:
    """Chooses the replica of the next request. No router knows output lengths.

    round_robin: in turn. random. two_choices: the one with fewer requests of two drawn. least_requests. least_kv: by the KV
    tokens of its running, swapped and waiting requests, as of its last event.
    """

    def __init__(self, name: str, replicas: int, seed: int) -> None:
        self._loads: list[float] = [0] * replicas
        self._measure: Callable[[Replica], float] | None = None
        draw, turn = random.Random(seed).randrange, cycle(range(replicas))
        if name == "round_robin":
            self.choose: Callable[[], int] = lambda: next(turn)
        elif name == "random":
            self.choose = lambda: draw(replicas)
        elif name == "two_choices":
            self._measure = attrgetter("requests")
            self.choose = lambda: min(draw(replicas), draw(replicas), key=self._loads.__getitem__)
        else:
            self._measure = attrgetter("requests" if name == "least_requests" else "load")
            self.choose = lambda: self._loads.index(min(self._loads))

    def update(self, i: int, replica: Replica) -> None:
        """Something happened on replica i."""
        if self._measure is not None:
            self._loads[i] = self._measure(replica)


def run_fluid(load: Load, costs: CostModel, draft: DraftOptions, system: SystemOptions, name: str = "", seed: int = 0) -> Report:
    """Replay the load. Raises CapacityError for a request that no pool can hold."""
    begun = time.perf_counter()
    capacity = system.kv_cache_tokens or costs.pool_tokens()
    rounds = Rounds(costs, draft, system, capacity)
    finished = [0.0] * len(load)
    lengths = Lengths.of(load)
    replicas = [Replica(lengths, rounds, capacity, system.max_num_seqs, system.kv_policy, system.reserve_tokens, finished)
                for _ in range(system.replicas)]
    _replay(replicas, Router(system.router, system.replicas, seed), (load.arrivals * 1e3).tolist())
    return _report(name, system, load, replicas, np.array(finished) / 1e3, capacity, time.perf_counter() - begun)


def _replay(replicas: list[Replica], router: Router, arrivals: list[float]) -> None:
    events: list[tuple[float, int, int]] = []  # (when, replica, version)
    versions = [0] * len(replicas)

    def plan(i: int) -> None:
        versions[i] += 1
        router.update(i, replicas[i])
        when = replicas[i].next_event()
        if when < NEVER:
            heapq.heappush(events, (when, i, versions[i]))

    def fire() -> None:
        _, i, version = heapq.heappop(events)
        if versions[i] == version:
            replicas[i].fire()
            plan(i)

    for request, when in enumerate(arrivals):
        while events and events[0][0] < when:
            fire()
        i = router.choose()
        if replicas[i].arrive(request, when):
            plan(i)
        else:
            router.update(i, replicas[i])
    while events:
        fire()


def _report(name: str, system: SystemOptions, load: Load, replicas: list[Replica], finished: np.ndarray, capacity: int,
            wall: float) -> Report:
    meters = [r.meter for r in replicas]

    def total(key: str) -> float:
        return sum(getattr(m, key) for m in meters)

    seconds = float(finished.max())
    iterations, loaded = total("iterations"), total("loaded")
    suffix = "_loaded" if loaded else ""
    counted = max(total("iterations" + suffix), 1e-9)
    stalled = replicas[0].rounds.stalled * total("slot_iterations") / replicas[0].rounds.iterations
    p50, p99 = latencies(finished, load.arrivals)
    span = seconds * 1e3 * len(replicas)
    return Report(
        name=name, system=system, requests=len(load), output_tokens=int(load.outputs.sum()), seconds=seconds, latency_p50=p50,
        latency_p99=p99, pool_use=total("kv") / capacity / span,
        pool_use_loaded=total("kv_loaded") / capacity / loaded if loaded else None, loaded_seconds=loaded / 1e3 / len(replicas),
        mean_running=total("running") / span, slot_use=1 - stalled / max(total("slot_iterations"), 1e-9), stalled_slots=stalled,
        iterations=iterations, step_ms=total("busy") / iterations, gemm_rows_mean=total("rows" + suffix) / counted,
        gemm_rows_std=(total("rows_variance" + suffix) / counted) ** 0.5 if replicas[0].rounds.lockstep else None,
        preemptions=int(total("preemptions")), recomputed_tokens=int(total("recomputed")),
        offloaded_tokens=int(total("offloaded")), restored_tokens=int(total("restored")), link_use=total("transfer_ms") / 2 / span,
        transfer_wait=total("transfer_wait") / 1e3, wall_seconds=wall)
