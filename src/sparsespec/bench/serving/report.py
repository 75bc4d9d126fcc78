"""What a serving benchmark found, under the names of vLLM's report and of its JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsespec.bench.serving.client import Answer

METRICS = {"ttft": ("TTFT", "Time to First Token"), "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
           "itl": ("ITL", "Inter-token Latency"), "e2el": ("E2EL", "End-to-end Latency")}
_WIDTH, _LABEL = 50, 40


@dataclass(frozen=True)
class Speculation:
    """Differences of the server's counters over the benchmark."""

    drafts: int
    draft_tokens: int
    accepted: int
    by_position: list[float]

    def figures(self) -> dict[str, Any]:
        """As vLLM names them. spec_decode_acceptance_length counts the target's own token too."""
        rounds, tokens = max(self.drafts, 1), max(self.draft_tokens, 1)
        return {"spec_decode_acceptance_rate": 100 * self.accepted / tokens,
                "spec_decode_acceptance_length": 1 + self.accepted / rounds, "spec_decode_num_drafts": self.drafts,
                "spec_decode_draft_tokens": self.draft_tokens, "spec_decode_accepted_tokens": self.accepted,
                "spec_decode_per_position_acceptance_rates": self.by_position}


def speculation(before: str, after: str) -> Speculation | None:
    """From two Prometheus pages, ours or vLLM's; None where nothing was drafted between them."""
    old, new = _counters(before), _counters(after)

    def grown(name: str) -> dict[str, float]:
        return {label: value - old.get((key, label), 0.0) for (key, label), value in new.items() if key == name}

    drafts, tokens, accepted = (int(sum(grown(f"spec_decode_num_{kind}_total").values()))
                                for kind in ("drafts", "draft_tokens", "accepted_tokens"))
    if not drafts:
        return None
    places = grown("spec_decode_num_accepted_tokens_per_pos_total")
    return Speculation(drafts, tokens, accepted, [places[p] / drafts for p in sorted(places, key=int)])


def _counters(page: str) -> dict[tuple[str, str], float]:
    """(name without prefix, position) → value, summed over engines."""
    from prometheus_client.parser import text_string_to_metric_families

    found: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.partition(":")[2]
            if name.startswith("spec_decode_num"):
                found[name, sample.labels.get("position", "")] += sample.value  # type: ignore[assignment]
    return {key: float(value) for key, value in found.items()}


def figures(answers: Sequence[Answer], duration: float, metrics: Sequence[str], percentiles: Sequence[float]) -> dict[str, Any]:
    """The summary of all answers; times in milliseconds over those that succeeded."""
    good = [a for a in answers if not a.error]
    inputs, outputs = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    out: dict[str, Any] = {
        "duration": duration, "completed": len(good), "failed": len(answers) - len(good), "total_input_tokens": inputs,
        "total_output_tokens": outputs, "request_throughput": len(good) / duration, "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration, "max_concurrent_requests": _most_at_once(answers),
    }
    values = {"ttft": [a.ttft for a in good], "tpot": [a.tpot for a in good if a.output_tokens > 1],
              "itl": [t for a in good for t in a.itl], "e2el": [a.latency for a in good]}
    for name in metrics:
        ms = [1e3 * v for v in values[name]] or [0.0]
        out |= {f"mean_{name}_ms": statistics.fmean(ms), f"median_{name}_ms": statistics.median(ms),
                f"std_{name}_ms": statistics.pstdev(ms)}
        out |= {f"p{p:g}_{name}_ms": float(np.percentile(ms, p)) for p in percentiles}
    return out


def _most_at_once(answers: Sequence[Answer]) -> int:
    events = sorted([(a.start, 1) for a in answers] + [(a.start + a.latency, -1) for a in answers])
    return int(max(np.cumsum([step for _, step in events]), default=0))


def block(result: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The text that is printed at the end."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]

    def line(label: str, value: float | int | str) -> None:
        shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
        lines.append(f"{label:<{_LABEL}} {shown}".rstrip())

    line("Successful requests:", result["completed"])
    line("Failed requests:", result["failed"])
    if result["max_concurrency"] is not None:
        line("Maximum request concurrency:", result["max_concurrency"])
    if result["request_rate"] != "inf":
        line("Request rate configured (RPS):", float(result["request_rate"]))
    line("Benchmark duration (s):", result["duration"])
    line("Total input tokens:", result["total_input_tokens"])
    line("Total generated tokens:", result["total_output_tokens"])
    line("Request throughput (req/s):", result["request_throughput"])
    line("Output token throughput (tok/s):", result["output_throughput"])
    line("Peak concurrent requests:", result["max_concurrent_requests"])
    line("Total Token throughput (tok/s):", result["total_token_throughput"])
    for name in metrics:
        short, title = METRICS[name]
        lines.append(f"{title:-^{_WIDTH}}")
        for kind in ("mean", "median"):
            line(f"{kind.capitalize()} {short} (ms):", result[f"{kind}_{name}_ms"])
        for p in percentiles:
            line(f"P{p:g} {short} (ms):", result[f"p{p:g}_{name}_ms"])
    if "spec_decode_num_drafts" in result:
        lines.append(f"{'Speculative Decoding':-^{_WIDTH}}")
        line("Acceptance rate (%):", result["spec_decode_acceptance_rate"])
        line("Acceptance length:", result["spec_decode_acceptance_length"])
        line("Drafts:", result["spec_decode_num_drafts"])
        line("Draft tokens:", result["spec_decode_draft_tokens"])
        line("Accepted tokens:", result["spec_decode_accepted_tokens"])
        lines.append("Per-position acceptance (%):")
        for place, rate in enumerate(result["spec_decode_per_position_acceptance_rates"]):
            line(f"  Position {place}:", 100 * rate)
    return "\n".join([*lines, "=" * _WIDTH])


def error_summary(answers: Sequence[Answer]) -> list[str]:
    """Each kind of failure once, with how often it came; the most frequent first."""
    return [f"{count} x {error}" for error, count in Counter(a.error for a in answers if a.error).most_common(5)]
