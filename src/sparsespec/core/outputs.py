"""What a caller gets back. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsespec.core.errors import SparseSpecError


@dataclass
class Logprob:
    """logprob: natural logarithm; rank: 1 is the most likely token; decoded_token: its text alone, if there is a tokenizer."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobDict = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One completion. finish_reason: 'stop' (EOS, stop id or string), 'length', 'abort', 'error', or None while it runs.

    stop_reason: the stop id or string that ended it; None for EOS. logprobs: one dict an id, as many as token_ids.
    from_draft: for each id whether it is an accepted draft; the target chose the others itself. Outputs that
    say the same are equal, whoever wrote them.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobDict] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    from_draft: list[bool] = field(default_factory=list, compare=False)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times in seconds on the monotonic clock; num_* count this request's speculation."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """All completions of one prompt. `lossless` is False only under synthetic acceptance."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[LogprobDict | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: SparseSpecError | None = None
    lossless: bool = True
