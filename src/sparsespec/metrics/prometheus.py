"""Prometheus metrics under the names of vLLM's dashboards, with our prefix; docs/metrics.md maps them.

Gauges and counters of the engine are read from its stats at each scrape; what happens to single requests is counted as
it happens. The registry is the server's own, so that several can live in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sparsespec.core.outputs import RequestMetrics
from sparsespec.core.sampling_params import SamplingParams

PREFIX = "sparsespec"
_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)
_COUNTS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_FEW = (1.0, 2.0, 5.0, 10.0, 20.0)
_LABELS = ("model_name", "engine")

Stats = Callable[[], dict[str, Any]]

_GAUGES = {
    "num_requests_running": ("running", "Completions that run"),
    "num_requests_waiting": ("waiting", "Completions that wait to run"),
    "num_requests_swapped": ("swapped", "Completions whose KV is on the host"),
    "spec_decode_draft_length": ("draft_length", "Drafts a round that the adaptive mode chooses now"),
    "device_kv_pages": ("device_pages_total", "Pages of the device's KV pool"),
    "device_kv_pages_free": ("device_pages_free", "Free pages of the device's KV pool"),
    "cached_kv_pages": ("cached_pages", "Pages that hold nothing but cached prefixes; they count as free"),
    "host_kv_pages": ("host_pages_total", "Pages of the host's KV pool"),
    "host_kv_pages_free": ("host_pages_free", "Free pages of the host's KV pool"),
}
_COUNTERS = {
    "generation_tokens": ("num_emitted_tokens", "Generated tokens"),
    "num_preemptions": ("num_preemptions", "Completions taken off the device"),
    "num_recomputed_tokens": ("num_recomputed_tokens", "Tokens whose KV was computed again after a preemption"),
    "offloaded_tokens": ("offloaded_tokens", "Tokens whose KV went to the host"),
    "restored_tokens": ("restored_tokens", "Tokens whose KV came back from the host"),
    "prefix_cache_hits": ("num_cached_tokens", "Prompt tokens that the prefix cache had"),
    "num_stalled_rows": ("num_stalled_rows", "Query rows that waited an iteration for a copy to make room"),
    "num_stalled_slots": ("num_stalled_slots", "Requests that sat an iteration out as their last result was not known yet"),
    "failed_copies": ("failed_copies", "Copies between device and host that failed"),
    "spec_decode_num_drafts": ("num_drafts", "Rounds that drafted"),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Drafted tokens"),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Accepted drafts"),
    "iterations": ("iterations", "Iterations of the engine"),
}
_POSITIONS = {
    "spec_decode_num_accepted_tokens_per_pos": ("accepted_per_position", "Accepted drafts by place in their round"),
    "spec_decode_num_draft_tokens_per_pos": ("drafted_per_position", "Drafts by place in their round"),
}
_POOLS = {"kv_cache_usage_perc": ("device", "device's"), "host_kv_cache_usage_perc": ("host", "host's")}


class EngineCollector(Collector):
    """Reads the engine's stats when Prometheus asks."""

    def __init__(self, stats: Stats, labels: dict[str, str]) -> None:
        self._stats = stats
        self._names, self._values = list(labels), list(labels.values())

    def collect(self) -> Iterator[Metric]:
        s = self._stats()
        for name, (key, text) in _GAUGES.items():
            if key in s:
                yield self._family(GaugeMetricFamily, name, text, [((), s[key])])
        for name, (pool, whose) in _POOLS.items():
            total, free = s[f"{pool}_pages_total"], s[f"{pool}_pages_free"]
            yield self._family(GaugeMetricFamily, name, f"Share of the {whose} KV pool in use, 0 to 1",
                               [((), (total - free) / total if total else 0.0)])
        for name, (key, text) in _COUNTERS.items():
            if key in s:
                yield self._family(CounterMetricFamily, name, text, [((), s[key])])
        for name, (key, text) in _POSITIONS.items():
            yield self._family(CounterMetricFamily, name, text, [((str(i),), v) for i, v in enumerate(s[key])], ("position",))
        yield self._family(CounterMetricFamily, "iteration_rows", "Query rows by what they were for",
                           [((phase,), rows) for phase, rows in s["rows_by_phase"].items()], ("phase",))
        yield self._family(GaugeMetricFamily, "last_iteration_rows", "Query rows of the last iteration",
                           [((phase,), rows) for phase, rows in s["last_rows_by_phase"].items()], ("phase",))
        yield self._family(CounterMetricFamily, "stage_seconds", "Seconds spent by stage of the step", [
            ((key.removeprefix("seconds_"),), value) for key, value in s.items() if key.startswith("seconds_")], ("stage",))

    def _family(self, kind: Any, name: str, text: str, samples: list[tuple[tuple[str, ...], float]],
                extra: tuple[str, ...] = ()) -> Metric:
        family = kind(f"{PREFIX}:{name}", text, labels=[*self._names, *extra])
        for labels, value in samples:
            family.add_metric([*self._values, *labels], value)
        found: Metric = family
        return found


class ServerMetrics:
    """A RequestObserver that counts. rejected: requests answered with an error, by HTTP status."""

    def __init__(self, stats: Stats, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        labels = dict(zip(_LABELS, (model_name, "0"), strict=True))
        self.registry.register(EngineCollector(stats, labels))
        self._labels = labels

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(f"{PREFIX}:{name}", text, _LABELS, registry=self.registry, buckets=buckets).labels(**labels)

        self._prompt_total = Counter(f"{PREFIX}:prompt_tokens", "Prompt tokens", _LABELS, registry=self.registry).labels(**labels)
        self._success = Counter(f"{PREFIX}:request_success", "Completions that ended", (*_LABELS, "finished_reason"),
                                registry=self.registry)
        self._errors = Counter(f"{PREFIX}:http_errors", "Requests answered with an error", (*_LABELS, "status"),
                               registry=self.registry)
        self._restarts = Counter(f"{PREFIX}:engine_restarts", "Times the engine loop was set up anew", _LABELS,
                                 registry=self.registry).labels(**labels)
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", _SHORT)
        self._itl = histogram("inter_token_latency_seconds", "Between two outputs of a streamed request", _TOKEN)
        self._tpot = histogram("request_time_per_output_token_seconds", "A request's mean time a token after the first", _TOKEN)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the end", _LONG)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first iteration", _LONG)
        self._prefill = histogram("request_prefill_time_seconds", "From the first iteration to the first token", _LONG)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the end", _LONG)
        self._inference = histogram("request_inference_time_seconds", "From the first iteration to the end", _LONG)
        self._prompt = histogram("request_prompt_tokens", "Tokens a prompt", _COUNTS)
        self._generation = histogram("request_generation_tokens", "Generated tokens a completion", _COUNTS)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens asked for", _COUNTS)
        self._n = histogram("request_params_n", "n asked for", _FEW)

    def admitted(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        self._prompt_total.inc(num_prompt_tokens)
        self._prompt.observe(num_prompt_tokens)
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)

    def grew(self, num_tokens: int, interval: float) -> None:
        self._itl.observe(interval)

    def ended(self, reasons: list[str], num_tokens: list[int], metrics: RequestMetrics) -> None:
        for reason, count in zip(reasons, num_tokens, strict=True):
            self._success.labels(**self._labels, finished_reason=reason).inc()
            self._generation.observe(count)
        scheduled, first, end = metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time
        if end is None:
            return
        self._e2e.observe(end - metrics.arrival_time)
        if scheduled is not None:
            self._queue.observe(scheduled - metrics.arrival_time)
            self._inference.observe(end - scheduled)
        if first is not None and scheduled is not None:
            self._ttft.observe(first - metrics.arrival_time)
            self._prefill.observe(first - scheduled)
            self._decode.observe(end - first)
            if max(num_tokens) > 1:
                self._tpot.observe((end - first) / (max(num_tokens) - 1))

    def left(self, num_completions: int) -> None:
        self._success.labels(**self._labels, finished_reason="abort").inc(num_completions)

    def restarted(self) -> None:
        self._restarts.inc()

    def rejected(self, status: int) -> None:
        """A request was answered with an error."""
        self._errors.labels(**self._labels, status=str(status)).inc()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
