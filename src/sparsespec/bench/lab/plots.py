"""Plots of a laboratory report, as PNG files. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparsespec.bench.lab.show import Figures, grouped, label
from sparsespec.core.errors import UnsupportedError

Panel = tuple[str, list[Figures]]


def draw(cells: list[Figures], folder: Path) -> list[Path]:
    """Write every plot that the cells give something for; the files written. Raises UnsupportedError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UnsupportedError("plot", str(folder), "matplotlib is not installed", "Run pip install 'sparsespec[bench]'") from e
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    panels = [(title, members) for title, cells_ in grouped(cells) if (members := [c for c in cells_ if c["verifications"]])]
    drafting = [(title, only) for title, members in panels if (only := [c for c in members if c["k"] is not None])]

    def save(name: str, chosen: Sequence[Panel], draw_panel: Callable[[Any, list[Figures]], None], height: float = 4.0) -> None:
        if not chosen:
            return
        figure = Figure(figsize=(8, height * len(chosen)), layout="constrained")
        for axes, (title, members) in zip(figure.subplots(len(chosen), squeeze=False)[:, 0], chosen, strict=True):
            axes.set_title(title, fontsize=9)
            draw_panel(axes, members)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=110)
        written.append(path)

    tall = 1.2 + 0.28 * max((len(members) for _, members in panels), default=0)
    for name, key, text in (("accepted", "accepted", "accepted drafts a verification"),
                            ("tokens_per_target_pass", "tokens_per_target_pass", "tokens a verification"),
                            ("tokens_per_weight_pass", "tokens_per_weight_pass", "tokens a pass through the weights"),
                            ("kv_bytes", "kv_bytes_per_token", "KV bytes read a token"),
                            ("predicted_speedup", "predicted_speedup", "predicted speed-up over plain decoding")):
        save(name, drafting if key == "accepted" else panels, _bars(key, text), tall)
    save("accepted_by_position", drafting, _by_position)
    save("accepted_by_context", _merge_contexts(drafting), _by_context)
    for curve, text in (("k", "drafts a round, k"), ("s", "share of the KV cache that a draft sees, s")):
        save(f"sweep_{curve}", [(t, m) for t, all_ in drafting if (m := [c for c in all_ if curve in c["curve"]])],
             _sweep(curve, text))
    return written


def _bars(key: str, text: str) -> Callable[[Any, list[Figures]], None]:
    def draw_panel(axes: Any, members: list[Figures]) -> None:
        names, values = [label(c) for c in members], [c[key] for c in members]
        bars = axes.barh(range(len(names)), values, color="tab:blue")
        axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(text)
        axes.margins(x=0.12)

    return draw_panel


def _by_position(axes: Any, members: list[Figures]) -> None:
    for c in members:
        shares = c["accepted_by_position"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=label(c))
    axes.set(xlabel="position of the draft", ylabel="share of rounds that accept it", ylim=(0, 1.02))
    axes.legend(fontsize=7)


def _by_context(axes: Any, members: list[Figures]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for c in members:
        lines.setdefault(label(c), []).extend(((b["from"] + b["to"]) / 2, b["accepted"]) for b in c["accepted_by_context"])
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
    axes.set(xlabel="context, tokens", ylabel="accepted drafts a verification")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def _merge_contexts(panels: Sequence[Panel]) -> list[Panel]:
    """One panel a dataset and temperature: its context lengths belong on one axis."""
    merged: dict[str, list[Figures]] = {}
    for _, members in panels:
        merged.setdefault(f"{members[0]['dataset']}, temperature {members[0]['temperature']:g}", []).extend(members)
    return list(merged.items())


def _sweep(curve: str, text: str) -> Callable[[Any, list[Figures]], None]:
    def draw_panel(axes: Any, members: list[Figures]) -> None:
        right = axes.twinx()
        for number, policy in enumerate(dict.fromkeys(c["policy"] for c in members)):
            points = sorted((c[curve], c["accepted"], c["predicted_speedup"]) for c in members if c["policy"] == policy)
            x, accepted, speedup = zip(*points, strict=True)
            axes.plot(x, accepted, marker="o", color=f"C{number}", label=f"{policy}: accepted")
            right.plot(x, speedup, marker="s", linestyle="--", color=f"C{number}", label=f"{policy}: predicted speed-up")
        axes.set(xlabel=text, ylabel="accepted drafts a verification (solid)")
        right.set_ylabel("predicted speed-up (dashed)")
        axes.set_ylim(bottom=0)
        right.set_ylim(bottom=0)
        axes.legend(fontsize=7, loc="lower right")

    return draw_panel
