"""Which simulations to run, and what to compare: KV policies (SparseSpec, figure 5), its ablation, routers, or one setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sparsespec.plan.costs import CostModel
from sparsespec.plan.exact import run_exact
from sparsespec.plan.fleet import run_fluid
from sparsespec.plan.options import ROUTERS, DraftOptions, SystemOptions
from sparsespec.plan.report import Report
from sparsespec.plan.workload import Load

# SparseSpec's ablation on AIME with Qwen3-8B on two H100s, each step on top of the ones before it.
PAPER = {"unified scheduler": 1.23, "KV manager": 1.61, "delayed verification": 1.12}
PAPER_TOTAL = 2.22


@dataclass(frozen=True)
class Factor:
    """Throughput of one run over that of another, and what the paper found for it (None: nothing)."""

    name: str
    before: str
    after: str
    factor: float
    paper: float | None


@dataclass
class Study:
    """Runs in groups, and the factors between them."""

    groups: dict[str, list[Report]] = field(default_factory=dict)
    factors: list[Factor] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"groups": {name: [r.document() for r in runs] for name, runs in self.groups.items()},
                "factors": [vars(f) for f in self.factors]}


class Lab:
    """Runs systems on one load. longest: the most tokens that an answer may have; progress is told the name of each run."""

    def __init__(self, load: Load, costs: CostModel, draft: DraftOptions, system: SystemOptions, longest: int, seed: int,
                 progress: Callable[[str], None]) -> None:
        self.load, self.costs, self.draft, self.system = load, costs, draft, system
        self.seed, self.progress = seed, progress
        room = (system.kv_cache_tokens or costs.pool_tokens()) - int(load.prompts.max())
        self.longest = min(longest, room)

    def run(self, name: str, **changes: Any) -> Report:
        """One simulation of the system with `changes`."""
        self.progress(name)
        system = replace(self.system, **changes)
        engine = run_exact if system.engine == "exact" else run_fluid
        return engine(self.load, self.costs, self.draft, system, name, self.seed)


def one(lab: Lab) -> Study:
    """The system as it was described."""
    s = lab.system
    name = "plain" if s.method == "none" else f"{s.method}, {s.schedule}"
    return Study({"simulation": [lab.run(f"{name}, {s.verification}, {s.kv_policy}")]})


def figure5(lab: Lab) -> Study:
    """Pool use and recomputation by KV policy: never enough, too much, and all of it."""
    runs = [lab.run("reserve (oracle)", kv_policy="reserve", reserve_tokens=None)]
    if lab.system.engine == "fluid":  # the scheduler reserves what a request may reach, which is here its true length
        runs.insert(0, lab.run(f"reserve {lab.longest:,}", kv_policy="reserve", reserve_tokens=lab.longest))
    runs += [lab.run(name, kv_policy=name, reserve_tokens=None) for name in ("recompute", "offload")]
    return Study({"KV policies": runs})


def ablation(lab: Lab) -> Study:
    """Naive drafts (lockstep, oracle reservation, synchronous verification), then one part of the system after the other.

    Plain decoding is as vLLM does it: recomputation, and the CPU's work beside the step.
    """
    base = {"method": "pillar", "reserve_tokens": None}
    plain = lab.run("plain decoding", method="none", schedule="unified", verification="device", kv_policy="recompute",
                    reserve_tokens=None)
    naive = lab.run("naive drafts", schedule="lockstep", verification="sync", kv_policy="reserve", **base)
    unified = lab.run("+ unified", schedule="unified", verification="sync", kv_policy="reserve", **base)
    recompute = lab.run("or recompute", schedule="unified", verification="sync", kv_policy="recompute", **base)
    managed = lab.run("+ KV manager", schedule="unified", verification="sync", kv_policy="offload", **base)
    lockstep = lab.run("or lockstep", schedule="lockstep", verification="sync", kv_policy="offload", **base)
    delayed = lab.run("+ delayed", schedule="unified", verification="delayed", kv_policy="offload", **base)
    device = lab.run("or on device", schedule="unified", verification="device", kv_policy="offload", **base)

    def factor(name: str, before: Report, after: Report, paper: float | None = None) -> Factor:
        return Factor(name, before.name, after.name, after.throughput / before.throughput, paper)

    factors = [factor(name, before, after, PAPER[name]) for name, before, after in (
        ("unified scheduler", naive, unified), ("KV manager", unified, managed), ("delayed verification", managed, delayed))]
    factors += [factor("together", naive, delayed, PAPER_TOTAL), factor("unified scheduler on a full pool", lockstep, managed),
                factor("KV manager against recompute", recompute, managed),
                factor("verification on the device against delayed", delayed, device),
                factor("all against plain decoding", plain, delayed)]
    return Study({"ablation": [plain, naive, unified, recompute, managed, lockstep, delayed, device]},
                 factors)


def routers(lab: Lab) -> Study:
    """Every router on the same load and fleet."""
    return Study({"routers": [lab.run(name, router=name) for name in ROUTERS]})


def everything(lab: Lab) -> Study:
    """figure5 and ablation."""
    first, second = figure5(lab), ablation(lab)
    return Study({**first.groups, **second.groups}, second.factors)


STUDIES: dict[str, Callable[[Lab], Study]] = {"one": one, "figure5": figure5, "ablation": ablation, "routers": routers,
                                              "all": everything}
