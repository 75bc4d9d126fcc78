"""Settings of the benchmarks: plain dataclasses whose fields become command-line flags. Imports nothing heavy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sparsespec.config.fields import check_choices, check_range, option
from sparsespec.core.errors import InvalidValueError

_EXTRA = """Give an object such as '{"top_k": 20}'"""


@dataclass(frozen=True)
class ThroughputOptions:
    """What `bench throughput` runs."""

    dataset: str = option("reasoning", "reasoning, code, longdoc, random, trace=aime, a file, FORMAT=FILE or FORMAT=hub:NAME")
    num_prompts: int = option(16, "prompts in the batch")
    input_len: int = option(128, "tokens of a random prompt, a text or a document")
    length_scale: float = option(1.0, "multiplies the lengths of a trace")
    max_tokens: int = option(256, "most tokens an answer has; random prompts get exactly as many")
    temperature: float = option(0.0, "0 is greedy, and only then can outputs be compared")
    compare: str | None = option(None, "give none to run the same prompts without speculation too, and compare the outputs")
    repeat: int = option(1, "timed passes; medians are reported")
    show_answers: bool = option(False, "print the answers")

    def __post_init__(self) -> None:
        check_choices(self)
        if self.compare not in (None, "none"):
            raise InvalidValueError("compare", self.compare, "not a method to compare with", "Give none, or leave it out")
        for name in ("num_prompts", "input_len", "max_tokens", "repeat"):
            check_range(name, getattr(self, name), 1)
        check_range("temperature", self.temperature, 0.0, integer=False)
        check_range("length_scale", self.length_scale, 1e-6, integer=False)


@dataclass(frozen=True)
class ServeOptions:
    """What `bench serve` sends, where and how fast. vLLM's names."""

    backend: str = option("openai", "API to use: /v1/completions or /v1/chat/completions", choices=("openai", "openai-chat"))
    base_url: str | None = option(None, "address of the server, instead of host and port")
    host: str = option("127.0.0.1", "host of the server")
    port: int = option(8000, "port of the server")
    endpoint: str | None = option(None, "path of the API where it is not the usual one")
    model: str | None = option(None, "model name to send; none: the first that the server has")
    tokenizer: str | None = option(None, "Hugging Face directory or name, for random prompts from its whole vocabulary")
    api_key: str | None = option(None, "sent as a bearer token")
    dataset_name: str = option("random", "random, reasoning, code, longdoc, custom, sharegpt, or what bench throughput takes")
    dataset_path: str | None = option(None, "file of a custom or sharegpt dataset: JSON, JSONL or Parquet")
    num_prompts: int = option(64, "requests")
    random_input_len: int = option(1024, "tokens of a random prompt; a text is cut to about as many")
    random_range_ratio: float = option(0.0, "lengths of random prompts and answers vary by this share to both sides")
    output_len: int = option(128, "max_tokens of each request")
    disable_oversample: bool = option(False, "refuse to send a prompt twice where the dataset is small")
    request_rate: float = option(float("inf"), "requests a second; inf: all at once")
    burstiness: float = option(1.0, "1: a Poisson process; less is burstier, more is more even")
    max_concurrency: int | None = option(None, "most requests under way")
    num_warmups: int = option(1, "requests before the measurement, at least one")
    ignore_eos: bool = option(False, "every answer has max_tokens tokens")
    temperature: float = option(0.0, "0 is greedy")
    extra_body: str | None = option(None, "JSON object that is added to each request")
    percentile_metrics: str = option("ttft,tpot,itl", "of ttft, tpot, itl, e2el: those reported")
    metric_percentiles: str = option("99", "percentiles reported, such as 50,90,99")
    seed: int = option(0, "of the prompts and arrival times, and sent with each request")
    save_result: bool = option(False, "write the JSON document to a file")
    save_detailed: bool = option(False, "with the figures and the text of each request")
    result_dir: str | None = option(None, "folder of that file")
    result_filename: str | None = option(None, "its name")

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("num_prompts", "random_input_len", "output_len"):
            check_range(name, getattr(self, name), 1)
        if self.max_concurrency is not None:
            check_range("max_concurrency", self.max_concurrency, 1)
        check_range("num_warmups", self.num_warmups, 0)
        check_range("random_range_ratio", self.random_range_ratio, 0.0, 1.0, integer=False)
        check_range("temperature", self.temperature, 0.0, integer=False)
        for name in ("request_rate", "burstiness"):
            check_range(name, getattr(self, name), 1e-9, integer=False)
        wrong = set(self.metrics) - {"ttft", "tpot", "itl", "e2el"}
        if wrong:
            raise InvalidValueError("percentile_metrics", self.percentile_metrics, f"{', '.join(sorted(wrong))} is not measured",
                                    "Choose from: ttft, tpot, itl, e2el")
        if not isinstance(self.extra, dict):
            raise InvalidValueError("extra_body", self.extra_body, "not a JSON object", _EXTRA)
        for p in self.percentiles:
            check_range("metric_percentiles", p, 0.0, 100.0, integer=False)

    @property
    def url(self) -> str:
        """Address without a path."""
        return self.base_url or f"http://{self.host}:{self.port}"

    @property
    def extra(self) -> dict[str, Any]:
        """extra_body, parsed."""
        try:
            return json.loads(self.extra_body or "{}")
        except ValueError as e:
            raise InvalidValueError("extra_body", self.extra_body, f"not JSON ({e})", _EXTRA) from e

    @property
    def metrics(self) -> list[str]:
        """Names of the times that are reported."""
        return [m.strip() for m in self.percentile_metrics.split(",") if m.strip()]

    @property
    def percentiles(self) -> list[float]:
        """Percentiles that are reported of each."""
        try:
            return [float(p) for p in self.metric_percentiles.split(",")]
        except ValueError as e:
            raise InvalidValueError("metric_percentiles", self.metric_percentiles, "not numbers",
                                    "Give some such as 50,90,99") from e


@dataclass(frozen=True)
class LatencyOptions:
    """What `bench latency` runs: one batch again and again. vLLM's names."""

    input_len: int = option(32, "tokens of each prompt")
    output_len: int = option(128, "tokens of each answer")
    batch_size: int = option(8, "requests in the batch")
    n: int = option(1, "answers a prompt")
    num_iters_warmup: int = option(2, "passes before the measurement")
    num_iters: int = option(10, "timed passes")
    temperature: float = option(0.0, "0 is greedy")

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
            check_range(name, getattr(self, name), 1)
        check_range("num_iters_warmup", self.num_iters_warmup, 0)
        check_range("temperature", self.temperature, 0.0, integer=False)
