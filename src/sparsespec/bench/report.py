"""How a throughput report looks: a table for people, a document for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparsespec.bench.compare import NEAR_TIE

if TYPE_CHECKING:
    from sparsespec.bench.throughput import Report


def document(report: Report) -> dict[str, Any]:
    """The report as JSON can hold it."""
    last = report.passes[-1]
    return {
        "model": report.model, "device": report.device, "dtype": report.dtype, "num_prompts": len(report.items),
        "passes": [p.figures() for p in report.passes],
        "outputs_identical": report.identical if report.compared else None,
        "differences": {name: [asdict(d) for d in found] for name, found in report.different.items()},
        "answers": [{"name": item.name, "question": item.question, "text": o.outputs[0].text,
                     "token_ids": o.outputs[0].token_ids, "finish_reason": o.outputs[0].finish_reason}
                    for item, o in zip(report.items, last.outputs, strict=True)],
    }


def show_answers(report: Report, console: Console) -> None:
    """Questions and what the last pass answered."""
    for item, output in zip(report.items, report.passes[-1].outputs, strict=True):
        completion = output.outputs[0]
        console.rule(f"{item.name} ({len(completion.token_ids)} tokens, {completion.finish_reason})", align="left")
        console.print(item.question, style="dim", markup=False, highlight=False)
        console.print(completion.text.strip() + "\n", markup=False, highlight=False)


def show_table(report: Report, console: Console) -> None:
    """One column a pass, one row a figure; then whether the outputs are the same."""
    figures = [p.figures() for p in report.passes]
    base = figures[0]["tokens_per_second"]
    table = Table(title=escape(f"{report.model}, {report.dtype.removeprefix('torch.')} on {report.device}, "
                               f"{len(report.items)} prompts in one batch"))
    table.add_column("")
    for f in figures:
        table.add_column(f["name"], justify="right")

    def row(title: str, key: str, form: str, unit: float = 1) -> None:
        table.add_row(title, *(format(f[key] / unit if unit != 1 else f[key], form) for f in figures))

    row("output tokens", "tokens", ",")
    row("seconds", "seconds", ".1f")
    row("tokens/s", "tokens_per_second", ".1f")
    if len(figures) > 1:
        table.add_row("speed-up", *(f"{f['tokens_per_second'] / base:.2f}x" for f in figures))
    row("iterations", "iterations", ",")
    row("GEMM rows an iteration", "gemm_rows_per_iteration", ".1f")
    row("KV MB read a token", "kv_bytes_per_token", ".2f", 1e6)
    row("KV GB/s", "kv_gigabytes_per_second", ".2f")
    row("draft rounds", "rounds", ",")
    table.add_row("accepted of drafted", *(
        f"{f['accepted_per_round']:.2f} of {f['drafted_per_round']:.2f}" if f["rounds"] else "-" for f in figures))
    depth = max(sum(share > 0 for share in f["accepted_by_position"]) for f in figures)
    for i in range(depth):
        table.add_row("rounds accepting draft 1" if i == 0 else f"{i + 1:>24}",
                      *(f"{f['accepted_by_position'][i]:.2f}" if i < len(f["accepted_by_position"]) else "-" for f in figures))
    console.print(table)
    for p, f in zip(report.passes, figures, strict=True):
        if p.name.endswith("adaptive"):
            console.print(_adaptive(p.draft_length, f), highlight=False)
    for line in _verdict(report):
        console.print(line, highlight=False, markup=False)


def _adaptive(length: int, figures: dict[str, Any]) -> str:
    """What the adaptive mode did, in words."""
    last = f"draft length {length}" if length else "plain decoding"
    drafted = (f"{figures['rounds']:,} draft rounds of {figures['drafted_per_round']:.1f} tokens on average"
               if figures["rounds"] else "no draft round")
    return f"adaptive: {drafted}; ended with {last}"


def _verdict(report: Report) -> list[str]:
    if not report.compared:
        return ["outputs identical: not compared (sampled)"] if len(report.passes) > 1 else []
    if report.identical:
        return ["outputs identical: yes"]
    lines = ["outputs identical: no"]
    limit = NEAR_TIE.get(report.dtype)
    for name, found in report.different.items():
        near = sum(d.gap is not None and limit is not None and d.gap <= limit for d in found)
        if not found:
            continue
        lines.append(f"  {name}: {len(found)} of {len(report.items)} outputs differ"
                     + (f", {near} of them from a near-tie on (log-probabilities within {limit}), where rounding in "
                        f"{report.dtype.removeprefix('torch.')} decides" if limit is not None else ""))
        lines += [f"    {report.items[d.prompt].name}: token {d.position}, {d.expected} against {d.got}, gap "
                  f"{'unknown' if d.gap is None else format(d.gap, '.4f')}" for d in found]
    return lines
