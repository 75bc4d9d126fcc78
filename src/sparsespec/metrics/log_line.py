"""The line that a server logs every few seconds: what went through since the last one, what runs and waits now."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class LogLine:
    """stats: () → the engine's stats."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self._stats = stats
        self._before, self._at = stats(), time.monotonic()
        self._was_idle = True

    def next(self) -> str | None:
        """The line, or None where nothing happened since the last one."""
        s, before, now = self._stats(), self._before, time.monotonic()
        seconds, self._at, self._before = max(now - self._at, 1e-9), now, s

        def gained(value: Any, old: Any) -> Any:
            return value - old if value >= old else value  # counters begin anew with an engine that was set up anew

        tokens = gained(s["num_emitted_tokens"], before["num_emitted_tokens"])
        rows = {p: gained(n, before["rows_by_phase"][p]) for p, n in s["rows_by_phase"].items()}
        idle = not sum(rows.values()) and not s["running"] and not s["waiting"]
        if idle and self._was_idle:
            return None
        self._was_idle = idle
        pages = s["device_pages_total"]
        parts = [
            f"Prefill: {rows['prefill'] / seconds:.1f} tokens/s", f"generation: {tokens / seconds:.1f} tokens/s",
            f"running: {s['running']}", f"waiting: {s['waiting']}", f"swapped: {s['swapped']}",
            f"KV pool: {100 * (pages - s['device_pages_free']) / max(pages, 1):.1f}%",
            "rows: " + " ".join(f"{p} {n}" for p, n in rows.items())]
        drafted = gained(s["num_draft_tokens"], before["num_draft_tokens"])
        if drafted:
            accepted = gained(s["num_accepted_tokens"], before["num_accepted_tokens"])
            drafts = gained(s["num_drafts"], before["num_drafts"])
            places = [f"{gained(a, b) / n:.2f}" for a, b, d, e in zip(
                s["accepted_per_position"], before["accepted_per_position"], s["drafted_per_position"],
                before["drafted_per_position"], strict=True) if (n := gained(d, e))]
            parts.append(f"accepted: {accepted} of {drafted} drafts ({accepted / max(drafts, 1):.2f} a round; by position "
                         f"{' '.join(places)})")
        return ", ".join(parts)
