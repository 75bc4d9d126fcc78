"""/v1/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, StrictBool, StrictInt

from sparsespec.server.protocol.common import GenerationBody, Speculation, Usage


class CompletionRequest(GenerationBody):
    """prompt: text, token ids, or a list of either. echo: begin the text with the prompt. max_tokens: 16 by default.

    best_of and suffix are known and refused where they ask for something.
    """

    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    max_tokens: StrictInt | None = None
    logprobs: StrictInt | None = None
    echo: StrictBool | None = None
    best_of: StrictInt | None = None
    suffix: str | None = None


class CompletionLogprobs(BaseModel):
    """One entry a token. top_logprobs: text to log probability; None where none were asked for."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionResponse(BaseModel):
    """The answer, and the shape of each event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None
    speculation: Speculation | None = None
