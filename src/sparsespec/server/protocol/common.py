"""What several endpoints share: errors, usage, and the fields of a request that asks for text.

Field types are checked here, their values by SamplingParams, which has the one definition of what is allowed.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt

Number = StrictInt | StrictFloat


class Body(BaseModel):
    """A request body; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """OpenAI's error shape."""

    error: ErrorInfo


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Speculation(BaseModel):
    """One request's drafts. acceptance_rate: accepted of drafted; mean_accepted: a round; both 0 where nothing was drafted."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float
    mean_accepted: float


class StreamOptions(Body):
    """include_usage: a last chunk with the usage and no choices; continuous_usage_stats: usage so far in every chunk."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class FunctionDefinition(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    """tool_choice that names one tool."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(BaseModel):
    """The `json_schema` of a response_format."""

    model_config = ConfigDict(populate_by_name=True)

    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationBody(Body):
    """Fields of chat and text completions alike. Beyond OpenAI's they are vLLM's; None: the default.

    request_id: the caller's own id, for /abort_request. timeout: seconds, not above the server's own limit.
    return_token_ids: prompt_token_ids and each choice's token_ids. return_speculation: this request's draft counts.
    user, metadata, store, service_tier, prompt_cache_key, safety_identifier: accepted, of no effect.
    """

    model: str | None = None
    n: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    seed: StrictInt | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[StrictInt] | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[StrictInt] | None = None
    prompt_logprobs: StrictInt | None = None
    skip_special_tokens: StrictBool | None = None
    spaces_between_special_tokens: StrictBool | None = None
    speculative_config: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    return_token_ids: StrictBool | None = None
    return_speculation: StrictBool | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=128, pattern=r"^[\w.:\-]+$")
    timeout: Number | None = Field(default=None, gt=0, le=1e6)
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


# Fields that go to SamplingParams under their own names.
SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words",
    "allowed_token_ids", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "speculative_config",
)
