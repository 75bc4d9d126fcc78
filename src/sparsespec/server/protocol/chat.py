"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from sparsespec.server.protocol.common import GenerationBody, NamedTool, Speculation, Tool, Usage


class TextPart(BaseModel):
    """A part of a message's content; only text is understood."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class ToolCallFunction(BaseModel):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolCallFunction


class Message(BaseModel):
    """One message. Further fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatCompletionRequest(GenerationBody):
    """max_tokens and max_completion_tokens mean the same; None: to the model's limit. include_reasoning: give it in the answer.
    thinking_token_budget: tokens of reasoning after which it is ended. return_draft_spans: which text accepted drafts wrote.

    continue_final_message: the answer goes on with the last message instead of beginning a new one.
    """

    messages: list[Message] = Field(min_length=1)
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: StrictBool | None = None
    thinking_token_budget: StrictInt | None = None
    return_draft_spans: StrictBool | None = None
    reasoning_effort: str | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None = None


class AnswerFunction(BaseModel):
    name: str
    arguments: str


class AnswerToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnswerToolCall] | None = None


class DraftSpans(BaseModel):
    """Of the text of the same name, from its first character on: [Unicode characters, whether accepted drafts wrote them]."""

    reasoning: list[tuple[int, bool]] | None = None
    content: list[tuple[int, bool]] | None = None


class ChatChoice(BaseModel):
    """finish_reason: stop, length, tool_calls or abort. stop_reason: the stop id or string, or what the server ended it for."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    draft_spans: DraftSpans | None = None


class ChatCompletionResponse(BaseModel):
    """The answer; a streamed one comes as chat.completion.chunk events with `delta` in the place of `message`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    speculation: Speculation | None = None
