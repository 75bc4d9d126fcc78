"""Settings of the benchmarks: plain dataclasses whose fields become command-line flags. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from sparsespec.config.fields import check_choices, check_range, option
from sparsespec.core.errors import InvalidValueError


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
