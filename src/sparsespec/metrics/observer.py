"""What a server's engine reports about its requests while they come and go; Prometheus and the log line listen."""

from __future__ import annotations

from typing import Protocol

from sparsespec.core.outputs import RequestMetrics
from sparsespec.core.sampling_params import SamplingParams


class RequestObserver(Protocol):
    """All calls come from the event loop and must be quick. Times in seconds."""

    def admitted(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """A request entered the engine."""

    def grew(self, num_tokens: int, interval: float) -> None:
        """A streamed request gained tokens, `interval` after the ones before."""

    def ended(self, reasons: list[str], num_tokens: list[int], metrics: RequestMetrics) -> None:
        """A request ended: one reason and one count a completion."""

    def left(self, num_completions: int) -> None:
        """The client of a request went away before its end."""

    def restarted(self) -> None:
        """The engine loop failed and was set up anew."""


class Unobserved:
    """Nobody listens."""

    def admitted(self, num_prompt_tokens: int, params: SamplingParams) -> None: ...

    def grew(self, num_tokens: int, interval: float) -> None: ...

    def ended(self, reasons: list[str], num_tokens: list[int], metrics: RequestMetrics) -> None: ...

    def left(self, num_completions: int) -> None: ...

    def restarted(self) -> None: ...
