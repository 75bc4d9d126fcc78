"""From a request's fields to SamplingParams. What is allowed is SamplingParams' business; what HTTP adds is bounded here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparsespec.core.errors import InvalidValueError, UnsupportedError
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.server.protocol.chat import ChatCompletionRequest
from sparsespec.server.protocol.common import SAMPLING_FIELDS, GenerationBody, NamedTool, Tool
from sparsespec.server.protocol.completions import CompletionRequest

# Most entries of lists whose length costs time at every step.
_MOST = {"stop": 64, "stop_token_ids": 1024, "bad_words": 1024}
_MAX_STOP_CHARS = 4096


def chat_params(body: ChatCompletionRequest, defaults: dict[str, Any]) -> SamplingParams:
    """SamplingParams of a chat request. defaults: for what it leaves open. Raises InvalidValueError, UnsupportedError."""
    values = defaults | _common(body)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidValueError("max_tokens", body.max_tokens, f"max_completion_tokens={body.max_completion_tokens} says otherwise",
                                "Give one of them")
    values["max_tokens"] = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if body.top_logprobs and not body.logprobs:
        raise InvalidValueError("top_logprobs", body.top_logprobs, "given without logprobs", "Set logprobs to true")
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    forced = forced_tool_schema(body)
    if forced is not None:
        if values.get("structured_outputs") is not None:
            raise InvalidValueError("tool_choice", "required", "a response format is forced too", "Give one of them")
        values["structured_outputs"] = {"json": forced}
    return SamplingParams(**values)


def completion_params(body: CompletionRequest, defaults: dict[str, Any]) -> SamplingParams:
    """SamplingParams of a text completion. defaults: for what it leaves open. Raises InvalidValueError, UnsupportedError."""
    values = defaults | _common(body)
    if body.max_tokens is not None:
        values["max_tokens"] = body.max_tokens
    if body.logprobs is not None:
        values["logprobs"] = body.logprobs
    if body.suffix:
        raise UnsupportedError("suffix", body.suffix, "text is only continued, not filled in", "Leave it out")
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise UnsupportedError("best_of", body.best_of, "all completions are returned", "Give n instead")
    if body.echo and body.logprobs is not None and values.get("prompt_logprobs") is None:
        values["prompt_logprobs"] = body.logprobs
    return SamplingParams(**values)


def with_reasoning(params: SamplingParams, end_str: str | None, budget: int | None, parsed: bool) -> SamplingParams:
    """What the engine is to know of the reasoning: where it ends, so that structure is asked of the answer alone.

    end_str: the text that ends it, None where the output holds none. budget: tokens after which it is ended. parsed: the
    server knows the model's form of reasoning.
    """
    if budget is not None and not parsed:
        raise UnsupportedError("thinking_token_budget", budget, "the server does not know the model's form of reasoning",
                               "Start it with --reasoning-parser")
    if end_str is None or (budget is None and params.structured_outputs is None):
        return params
    return replace(params, reasoning_end_str=end_str, thinking_token_budget=budget)


def _common(body: GenerationBody) -> dict[str, Any]:
    values = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    for name, most in _MOST.items():
        entries = values.get(name)
        if isinstance(entries, list) and len(entries) > most:
            raise InvalidValueError(name, f"{len(entries)} entries", f"more than {most}", "Give fewer")
    stop = values.get("stop")
    if stop is not None and sum(map(len, [stop] if isinstance(stop, str) else stop)) > _MAX_STOP_CHARS:
        raise InvalidValueError("stop", "...", f"more than {_MAX_STOP_CHARS} characters in all", "Give shorter strings")
    structure = _structure(body)
    if structure is not None:
        values["structured_outputs"] = structure
    if body.stream_options is not None and not body.stream:
        raise InvalidValueError("stream_options", "given", "the response is not streamed", "Set stream to true, or leave it out")
    return values


def _structure(body: GenerationBody) -> dict[str, Any] | None:
    """What the request says about the form of the output, as SamplingParams.structured_outputs."""
    found: list[tuple[str, dict[str, Any]]] = []
    if body.structured_outputs is not None:
        found.append(("structured_outputs", body.structured_outputs))
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            found.append((f"guided_{kind}", {kind: value}))
    form = body.response_format
    if form is not None and form.type == "json_object":
        found.append(("response_format", {"json_object": True}))
    if form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise InvalidValueError("response_format", form.type, "no json_schema.schema is given", "Give the schema")
        found.append(("response_format", {"json": form.json_schema.schema_}))
    if len(found) > 1:
        raise InvalidValueError(found[1][0], found[1][1], f"{found[0][0]} is given too", "Give one of them")
    return found[0][1] if found else None


def forced_tool_schema(body: ChatCompletionRequest) -> dict[str, Any] | None:
    """JSON schema of the output where tool_choice forces a call: the arguments of a named tool, or a list of calls."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    if not body.tools:
        raise InvalidValueError("tool_choice", choice, "no tools are given", "Give tools, or leave tool_choice out")
    if isinstance(choice, NamedTool):
        tool = next((t for t in body.tools if t.function.name == choice.function.name), None)
        if tool is None:
            raise InvalidValueError("tool_choice", choice.function.name, "not among the tools", "Name one of them")
        return _parameters(tool)
    calls = [{"type": "object", "properties": {"name": {"const": t.function.name}, "parameters": _parameters(t)},
              "required": ["name", "parameters"], "additionalProperties": False} for t in body.tools]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}}


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}
