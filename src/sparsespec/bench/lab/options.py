"""Settings of `bench acceptance` and `bench sweep`: their fields become command-line flags. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sparsespec.config.fields import check_range, option
from sparsespec.core.errors import InvalidValueError


@dataclass(frozen=True)
class LabOptions:
    """What both measure on, and the GPU that the speed-up is predicted for."""

    datasets: tuple[str, ...] = option(
        ("reasoning", "code", "longdoc"), "reasoning, code, longdoc, random, a file, FORMAT=FILE or FORMAT=hub:NAME")
    contexts: tuple[int, ...] = option((), "tokens before the measured part: texts are cut to them, and answers to questions are "
                                       "written out to them by plain decoding first; none: 2048 of a text, a question alone")
    temperatures: tuple[float, ...] = option((0.0,), "0 is greedy, and only then are outputs compared")
    num_prompts: int = option(4, "prompts of each dataset, in one batch")
    max_tokens: int = option(128, "measured tokens of each prompt")
    write_temperature: float = option(0.65, "temperature at which answers are written out to a context length")
    reuse_prefill: bool = option(True, "compute each prompt once and copy its KV to the requests of every cell")
    context_bucket: int = option(256, "width of the context ranges in which acceptance is reported, in tokens")
    gpu: str = option("h200", "GPU of the predicted speed-up: h200, or a JSON file with its measured curve")
    gpu_model: str = option("qwen3-8b", "shape that runs there: qwen3-1.7b, qwen3-8b, qwen3-14b, this, or a model directory")
    gpu_batch: int = option(128, "requests in its batch")
    gpu_context: int | None = option(None, "tokens of context of each; none: the measured one")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens", "context_bucket", "gpu_batch"):
            check_range(name, getattr(self, name), 1)
        check_each("contexts", self.contexts, 1)
        check_each("temperatures", self.temperatures, 0.0, integer=False)
        check_range("write_temperature", self.write_temperature, 0.0, integer=False)
        if self.gpu_context is not None:
            check_range("gpu_context", self.gpu_context, 1)
        if not self.datasets or not self.temperatures:
            raise InvalidValueError("datasets" if not self.datasets else "temperatures", (), "empty", "Name at least one")


@dataclass(frozen=True)
class AcceptanceOptions(LabOptions):
    """The matrix: policies x k x s on every dataset, context and temperature."""

    policies: tuple[str, ...] = option(("all",), "names, or NAME:setting=value,...; all: each policy that these settings can build")
    k: tuple[int, ...] = option((8,), "drafts a round")
    s: tuple[float, ...] = option((0.05,), "share of the KV cache that a draft sees")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_each("k", self.k, 1)
        check_each("s", self.s, 0.0, integer=False)
        for name in ("policies", "k", "s"):
            if not getattr(self, name):
                raise InvalidValueError(name, (), "empty", "Name at least one")


@dataclass(frozen=True)
class SweepOptions(LabOptions):
    """The two sensitivity curves of SparseSpec (arXiv 2512.01278): k at a fixed s, and s at a fixed k."""

    policies: tuple[str, ...] = option(("pillar",), "names, or NAME:setting=value,...")
    sweep_k: tuple[int, ...] = option((4, 8, 12, 16, 20), "drafts a round, at --at-s")
    sweep_s: tuple[float, ...] = option((0.05, 0.1, 0.15, 0.2, 0.25), "share of the KV cache that a draft sees, at --at-k")
    at_k: int = option(8, "drafts a round while s is swept")
    at_s: float = option(0.05, "share of the KV cache while k is swept")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_each("sweep_k", (*self.sweep_k, self.at_k), 1)
        check_each("sweep_s", (*self.sweep_s, self.at_s), 0.0, integer=False)
        if not self.policies or not (self.sweep_k or self.sweep_s):
            raise InvalidValueError("policies" if not self.policies else "sweep_k", (), "empty", "Name at least one")


def check_each(name: str, values: Iterable[Any], low: float, *, integer: bool = True) -> None:
    """Raise InvalidValueError for a value that is no number of at least `low`."""
    for value in values:
        check_range(name, value, low, integer=integer)
