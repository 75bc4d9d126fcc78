"""Plots of a laboratory report, as PNG files. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparsespec.bench.lab.show import Figures, grouped, label
from sparsespec.core.errors import UnsupportedError

Panel = tuple[str, list[Figures]]
Draw = Callable[[Any, list[Figures]], None]


def draw(cells: list[Figures], folder: Path) -> list[Path]:
    """Write every plot that the cells give something for; the files written. Raises UnsupportedError without matplotlib."""
    try:
        import matplotlib  # noqa: F401 - asked for here, so that nothing is written where it is missing
    except ImportError as e:
        raise UnsupportedError("plot", str(folder), "matplotlib is not installed", "Run pip install 'sparsespec[bench]'") from e
    folder.mkdir(parents=True, exist_ok=True)
    panels = [(title, some) for title, members in grouped(cells) if (some := [c for c in members if c["verifications"]])]
    drafting = [(title, some) for title, members in panels if (some := [c for c in members if c["k"] is not None])]
    tall = 1.2 + 0.28 * max((len(members) for _, members in panels), default=0)
    written = [_save(folder / f"{key}.png", drafting if key == "accepted" else panels, [_bars(key, text, unit)], tall)
               for key, text, unit in (
                   ("accepted", "accepted drafts a verification", 1.0), ("tokens_per_target_pass", "tokens a verification", 1.0),
                   ("tokens_per_weight_pass", "tokens a pass through the weights", 1.0),
                   ("kv_bytes_per_token", "MB of KV read a token", 1e6),
                   ("predicted_speedup", "predicted speed-up over plain decoding", 1.0))]
    written.append(_save(folder / "accepted_by_position.png", drafting, [_by_position]))
    written.append(_save(folder / "accepted_by_context.png", _merge_contexts(drafting), [_by_context]))
    for curve, text in (("k", "drafts a round, k"), ("s", "share of the KV cache that a draft sees, s")):
        chosen = [(title, some) for title, members in drafting if (some := [c for c in members if curve in c["curve"]])]
        written.append(_save(folder / f"sweep_{curve}.png", chosen, [
            _sweep(curve, text, "accepted", "accepted drafts a verification"),
            _sweep(curve, text, "predicted_speedup", "predicted speed-up over plain decoding")]))
    return [path for path in written if path is not None]


def _save(path: Path, panels: Sequence[Panel], columns: Sequence[Draw], height: float = 4.0) -> Path | None:
    """One row of axes a panel; None where there are no panels."""
    from matplotlib.figure import Figure

    if not panels:
        return None
    figure = Figure(figsize=(8 if len(columns) == 1 else 11, height * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), len(columns), squeeze=False)
    for axes, (title, members) in zip(rows, panels, strict=True):
        for place, draw_panel in zip(axes, columns, strict=True):
            place.set_title(title, fontsize=9)
            draw_panel(place, members)
    figure.savefig(path, dpi=110)
    return path


def _bars(key: str, text: str, unit: float) -> Draw:
    def draw_panel(axes: Any, members: list[Figures]) -> None:
        names, values = [label(c) for c in members], [c[key] / unit for c in members]
        axes.bar_label(axes.barh(range(len(names)), values, color="tab:blue"), fmt="%.3g", fontsize=8, padding=2)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(text)
        axes.margins(x=0.12)

    return draw_panel


def _lines(axes: Any, lines: dict[str, list[tuple[float, float]]], x: str, y: str) -> None:
    from matplotlib import colormaps

    axes.set_prop_cycle(color=list(colormaps["tab20"](range(20))))
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
    axes.set(xlabel=x, ylabel=y)
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def _by_position(axes: Any, members: list[Figures]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {
        label(c): list(enumerate(c["accepted_by_position"], 1)) for c in members if c["accepted_by_position"]}
    _lines(axes, lines, "position of the draft", "share of rounds that accept it")
    axes.set_xticks(range(1, max(map(len, lines.values()), default=1) + 1))


def _by_context(axes: Any, members: list[Figures]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for c in members:
        lines.setdefault(label(c), []).extend(((b["from"] + b["to"]) / 2, b["accepted"]) for b in c["accepted_by_context"])
    _lines(axes, lines, "context, tokens", "accepted drafts a verification")


def _merge_contexts(panels: Sequence[Panel]) -> list[Panel]:
    """One panel a dataset and temperature: its context lengths belong on one axis."""
    merged: dict[str, list[Figures]] = {}
    for _, members in panels:
        merged.setdefault(f"{members[0]['dataset']}, temperature {members[0]['temperature']:g}", []).extend(members)
    return list(merged.items())


def _sweep(curve: str, x: str, key: str, y: str) -> Draw:
    def draw_panel(axes: Any, members: list[Figures]) -> None:
        lines: dict[str, list[tuple[float, float]]] = {}
        for c in members:
            lines.setdefault(c["policy"], []).append((c[curve], c[key]))
        _lines(axes, lines, x, y)

    return draw_panel
