"""How the laboratory's report looks: tables for people, a document for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparsespec.bench.lab.options import LabOptions
from sparsespec.bench.lab.run import Report

Figures = dict[str, Any]
_POSITIONS = 20  # columns of the table by position
WIDTH = 108  # characters that the tables need


def document(report: Report, options: LabOptions) -> dict[str, Any]:
    """The report as JSON can hold it."""
    return {**asdict(report), "options": asdict(options)}


def show(report: Report, console: Console) -> None:
    """A table of figures and one of acceptance by position for each dataset, context and temperature."""
    console.print(f"{report.model}, {report.dtype.removeprefix('torch.')} on {report.device}", highlight=False, markup=False)
    for title, cells in grouped(report.cells):
        console.print(_figures(title, cells))
        if any(c["accepted_by_position"] for c in cells):
            console.print(_positions(cells))
    s = report.scenario
    context = f"{s['context']:,} tokens" if s["context"] else "the measured length"
    console.print(f"predicted: {s['model']} on {s['gpu']}, {s['batch']} requests of {context}", highlight=False)
    for policy, reason in report.left_out.items():
        console.print(f"left out: {policy}: {reason}", highlight=False, markup=False)
    compared = [c for c in report.cells if c["lossless"] is not None]
    if compared:
        wrong = sum(not c["lossless"] for c in compared)
        console.print(f"lossless: {'no' if wrong else 'yes'} ({len(compared) - wrong} of {len(compared)} cells give the outputs of "
                      "plain decoding)", highlight=False)


def grouped(cells: list[Figures]) -> Iterator[tuple[str, list[Figures]]]:
    """(title, cells) of each dataset, context and temperature, in the order of measurement."""
    def key(c: Figures) -> tuple[Any, ...]:
        return c["dataset"], c["context"], c["temperature"]

    for (dataset, _, temperature), group in groupby(cells, key):
        members = list(group)
        length = sum(c["prompt_tokens"] for c in members) / len(members)
        prompts = f"{members[0]['prompts']} prompt{'s' if members[0]['prompts'] > 1 else ''}"
        yield f"{dataset}, {prompts} of {length:,.0f} tokens, temperature {temperature:g}", members


def label(cell: Figures) -> str:
    """A cell in few words."""
    return cell["policy"] + "".join(f" {name}={cell[name]:g}" for name in ("k", "s") if cell[name] is not None)


def _number(value: float | None, form: str, suffix: str = "") -> str:
    return "-" if value is None else format(value, form) + suffix


def _figures(title: str, cells: list[Figures]) -> Table:
    table = Table(title=escape(title), box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", overflow="fold", min_width=12)
    for name in ("k", "s", "accepted", "tokens a\nverification", "tokens a\npass", "KV MB\na token", "of\nplain",
                 "predicted\nspeed-up", "lossless"):
        table.add_column(name, justify="right", no_wrap=True)
    for c in cells:
        lossless = {None: "-", True: "yes" if not c["different_outputs"] else "near-tie", False: "no"}[c["lossless"]]
        accepted = f"{c['accepted']:.2f} of {c['drafted']:.2f}" if c["drafted"] else "-"
        table.add_row(escape(c["policy"]), _number(c["k"], "d"), _number(c["s"], "g"), accepted,
                      _number(c["tokens_per_target_pass"], ".2f"), _number(c["tokens_per_weight_pass"], ".2f"),
                      _number(c["kv_bytes_per_token"] and c["kv_bytes_per_token"] / 1e6, ".2f"), _number(c["kv_share"], ".2f"),
                      _number(c["predicted_speedup"], ".2f", "x"), lossless)
    return table


def _positions(cells: list[Figures]) -> Table:
    drafting = [c for c in cells if c["accepted_by_position"]]
    depth = min(max(len(c["accepted_by_position"]) for c in drafting), _POSITIONS)
    table = Table(title="share of rounds that accept the draft at each position", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold", min_width=20)
    for i in range(depth):
        table.add_column(str(i + 1), justify="right", no_wrap=True)
    for c in drafting:
        shares = c["accepted_by_position"][:depth]
        table.add_row(escape(label(c)), *(f"{share:.2f}" for share in shares), *[""] * (depth - len(shares)))
    return table
