"""Settings of `sparsespec plan`: plain dataclasses whose fields become command-line flags. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparsespec.config.fields import check_choices, check_range, option
from sparsespec.core.errors import InvalidValueError, UnsupportedError

ROUTERS = ("round_robin", "random", "two_choices", "least_requests", "least_kv")
DATASETS = ("aime", "olympiadbench", "livecodebench")
POLICIES = ("reserve", "recompute", "offload")


@dataclass(frozen=True)
class DraftOptions:
    """The machine, the model and how it drafts."""

    gpu: str = option("h200", "h200, h100, h100x2 (two, tensor parallel), or a JSON file of costs")
    model: str = option("qwen3-8b", "qwen3-1.7b, qwen3-8b, qwen3-14b, or a Hugging Face config.json")
    num_speculative_tokens: int = option(8, "k, tokens drafted between two verifications")
    sparse_attn_ratio: float = option(0.05, "s, share of the KV cache that a draft step sees")
    min_budget: int = option(128, "KV entries that a draft step sees at least, where the context has them")
    acceptance: str = option("0.9417", "chance of a draft, given that those before it were accepted: one number, or one a "
                             "position with commas, the last one for all beyond; the default accepts 6.16 of 8")

    def __post_init__(self) -> None:
        check_range("num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        check_range("sparse_attn_ratio", self.sparse_attn_ratio, 0.0, 1.0, integer=False)
        check_range("min_budget", self.min_budget, 0)
        _ = self.profile

    @property
    def profile(self) -> tuple[float, ...]:
        """Acceptance of each of the k positions, given that those before it were accepted."""
        rates: list[float] = []
        for part in self.acceptance.split(","):
            try:
                rate = float(part)
            except ValueError:
                rate = math.nan
            if not 0.0 <= rate <= 1.0:
                raise InvalidValueError("acceptance", self.acceptance, f"{part.strip()!r} is not a number from 0 to 1",
                                        "Give one number or several with commas, such as 0.97,0.95,0.9")
            rates.append(rate)
        k = self.num_speculative_tokens
        return tuple((rates + [rates[-1]] * k)[:k])


@dataclass(frozen=True)
class FormulaOptions:
    """One point of the closed formula."""

    batch_size: int = option(128, "B, requests that decode together")
    context_len: int = option(8192, "tokens of KV that each of them has")
    alpha: float | None = option(None, "share of the drafts that is accepted, the same for every k; none: from the acceptance")

    def __post_init__(self) -> None:
        check_range("batch_size", self.batch_size, 1)
        check_range("context_len", self.context_len, 1)
        if self.alpha is not None:
            check_range("alpha", self.alpha, 0.0, 1.0, integer=False)


@dataclass(frozen=True)
class LoadOptions:
    """Which requests come, and when."""

    requests: int = option(2048, "requests to replay")
    dataset: str = option("aime", "whose lengths to draw", choices=DATASETS)
    mean_output_len: float | None = option(None, "mean output tokens; none: the dataset's")
    std_output_len: float | None = option(None, "standard deviation of the output tokens; none: the dataset's")
    length_distribution: str = option("lognormal", "shape of the output lengths", choices=("lognormal", "normal"))
    max_output_len: int = option(32768, "no answer is longer")
    lengths_file: str | None = option(None, "JSON lines to take lengths from instead: an output length, [input, output], or an "
                                      "object with output_len and optionally input_len and arrival (seconds)")
    request_rate: float | None = option(None, "requests a second in all, Poisson; none: all at once")
    seed: int = option(0, "seeds lengths, arrivals and acceptance")

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("requests", self.requests, 1)
        for name in ("mean_output_len", "std_output_len"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 1 if name.startswith("mean") else 0, integer=False)
        check_range("max_output_len", self.max_output_len, 1)
        if self.request_rate is not None:
            check_range("request_rate", self.request_rate, 1e-9, integer=False)
        check_range("seed", self.seed, 0)


@dataclass(frozen=True)
class SystemOptions:
    """How a replica schedules, and how many there are."""

    method: str = option("pillar", "pillar drafts with sparse attention; none decodes plainly", choices=("pillar", "none"))
    schedule: str = option("unified", "unified mixes drafts and verifications; lockstep alternates",
                           choices=("unified", "lockstep"))
    verification: str = option("delayed", "when the CPU handles a verification's result", choices=("sync", "delayed", "device"))
    kv_policy: str = option("offload", "what happens when the KV pool is full", choices=POLICIES)
    reserve_tokens: int | None = option(None, "tokens that kv_policy reserve sets aside for each output; none: its true length")
    max_num_seqs: int = option(256, "requests that run at once on a replica")
    max_num_batched_tokens: int = option(2048, "rows of one iteration (exact engine)")
    kv_cache_tokens: int | None = option(None, "KV pool of a replica in tokens; none: what the GPU's memory leaves")
    replicas: int = option(1, "copies of the model behind the router")
    router: str = option("round_robin", "who gets the next request", choices=ROUTERS)
    engine: str = option("fluid", "fluid: event-driven, fast; exact: the engine's own scheduler, step by step",
                         choices=("fluid", "exact"))

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("max_num_seqs", "max_num_batched_tokens", "replicas"):
            check_range(name, getattr(self, name), 1)
        for name in ("kv_cache_tokens", "reserve_tokens"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 1)
        if self.reserve_tokens is not None and self.kv_policy != "reserve":
            raise InvalidValueError("reserve_tokens", self.reserve_tokens, f"has no effect with kv_policy {self.kv_policy}",
                                    "Use kv_policy reserve, or leave it out")
        if self.verification == "delayed" and self.schedule == "lockstep" and self.method != "none":
            raise UnsupportedError("verification", "delayed", "in lockstep all requests verify together, so no other work could "
                                   "hide the delay", "Use schedule unified, or verification sync or device")
