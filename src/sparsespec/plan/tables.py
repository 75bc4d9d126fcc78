"""How plans look: tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from sparsespec.plan.costs import CostModel
from sparsespec.plan.report import Report
from sparsespec.plan.speedup import Gain, best
from sparsespec.plan.study import Study
from sparsespec.plan.workload import Load


def about_costs(costs: CostModel) -> str:
    """Where the costs come from, in a line."""
    kind = "derived, not measured" if costs.gpu.derived else "measured"
    scaled = f"; products scaled from {costs.scaled_from} by weights" if costs.scaled_from else ""
    return f"{costs.gpu.name} ({kind}{scaled})"


def about_load(load: Load) -> str:
    """The load in a line."""
    outputs, span = load.outputs, load.arrivals[-1]
    when = f"arriving over {span:,.0f} s" if span else "all at once"
    size = f"{load.prompts.mean():.0f} tokens in, {outputs.mean():,.0f} ± {outputs.std():,.0f} out"
    return f"{len(load):,} requests, {size}, {when}"


def show_gains(found: Sequence[Gain], title: str, console: Console) -> None:
    """One row a k; the best is marked."""
    table = Table(title=title)
    for name in ("k", "tokens/round", "GEMM rows", "iteration ms", "ms/token", "gain", "formula", "attention only"):
        table.add_column(name, justify="right")
    top = best(found)
    for g in found:
        style = "bold" if g is top else None
        table.add_row(str(g.k) if g.k else "plain", f"{g.tokens:.2f}", f"{g.rows:.0f}", f"{g.iteration_ms:.2f}",
                      f"{g.token_ms:.2f}", f"{g.gain:.2f}x", f"{g.formula:.2f}x", f"{g.attention_gain:.2f}x", style=style)
    console.print(table)
    console.print(f"best: {'k = ' + str(top.k) if top.k else 'plain decoding'}, {top.gain:.2f}x of plain decoding", highlight=False)


def show_study(study: Study, console: Console) -> None:
    """A table a group, then the factors beside the paper's."""
    for name, runs in study.groups.items():
        _show_runs(name, runs, console)
    if study.factors:
        table = Table(title="throughput factors (paper: AIME, Qwen3-8B on two H100s)")
        for column in ("", "from", "to", "here", "paper"):
            table.add_column(column, justify="right" if column in ("here", "paper") else "left")
        for f in study.factors:
            table.add_row(f.name, f.before, f.after, f"{f.factor:.2f}x", f"{f.paper:.2f}x" if f.paper else "-")
        console.print(table)


def _show_runs(title: str, runs: Sequence[Report], console: Console) -> None:
    table = Table(title=title)
    table.add_column("")
    for r in runs:
        table.add_column(r.name, justify="right")

    def row(name: str, values: Sequence[str]) -> None:
        table.add_row(name, *values)

    row("output tokens/s", [f"{r.throughput:,.0f}" for r in runs])
    row("seconds", [f"{r.seconds:,.0f}" for r in runs])
    row("latency p50, s", [f"{r.latency_p50:,.1f}" for r in runs])
    row("latency p99, s", [f"{r.latency_p99:,.1f}" for r in runs])
    row("pool use, %", [f"{100 * r.pool_use:.1f}" for r in runs])
    row("  under load, %", ["-" if r.pool_use_loaded is None else f"{100 * r.pool_use_loaded:.1f}" for r in runs])
    row("recomputed, M tokens", [f"{r.recomputed_tokens / 1e6:,.3f}" for r in runs])
    row("  for 100 output tokens", [f"{100 * r.recomputed_share:.1f}" for r in runs])
    row("preemptions", [f"{r.preemptions:,}" for r in runs])
    row("offloaded, M tokens", [f"{r.offloaded_tokens / 1e6:,.3f}" for r in runs])
    row("host link use, %", [f"{100 * r.link_use:.2f}" for r in runs])
    row("running requests", [f"{r.mean_running:.1f}" for r in runs])
    row("slot use, %", [f"{100 * r.slot_use:.1f}" for r in runs])
    row("  stalled, M", [f"{r.stalled_slots / 1e6:.3f}" for r in runs])
    row("GEMM rows", [f"{r.gemm_rows_mean:.1f}" for r in runs])
    row("  ± within rounds", ["-" if r.gemm_rows_std is None else f"{r.gemm_rows_std:.1f}" for r in runs])
    row("ms an iteration", [f"{r.step_ms:.2f}" for r in runs])
    console.print(table)
