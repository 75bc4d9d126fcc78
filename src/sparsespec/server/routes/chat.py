"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sparsespec.core.errors import UnsupportedError
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.server.chat_answer import ChatAnswer
from sparsespec.server.encoding import json_bytes
from sparsespec.server.params import chat_params, with_reasoning
from sparsespec.server.parsing import Parsing
from sparsespec.server.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from sparsespec.server.render import Prompt
from sparsespec.server.service import Served, Service, error_docs
from sparsespec.server.sse import EventStream, while_connected

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletionResponse,
             responses=error_docs(400, 401, 404, 413, 429, 500, 503, 504))
async def create_chat_completion(body: ChatCompletionRequest, request: Request, service: Served) -> Response:
    """Answer a conversation; streamed as server-sent events where `stream` is true."""
    service.check_model(body.model)
    params = chat_params(body, service.defaults)
    _refuse(body)
    response_id = service.response_id("chatcmpl-", request, body.request_id)
    headers = {"x-request-id": response_id}
    if body.stream:
        return EventStream(_stream(service, body, params, response_id), headers)
    answer = await while_connected(request.receive, _full(service, body, params, response_id))
    return Response(json_bytes(answer), headers=headers, media_type="application/json")


def _refuse(body: ChatCompletionRequest) -> None:
    if body.chat_template is not None:
        raise UnsupportedError("chat_template", body.chat_template, "templates are not taken from requests",
                               "Start the server with --chat-template, or render the prompt and use /v1/completions")
    if body.return_draft_spans and body.tools and body.tool_choice != "none":
        raise UnsupportedError("return_draft_spans", True, "not available where tools may be called", "Leave one of them out")
    if body.stream and body.prompt_logprobs is not None:
        raise UnsupportedError("prompt_logprobs", body.prompt_logprobs, "not available in a stream", "Set stream to false")


async def _prepare(service: Service, body: ChatCompletionRequest, params: SamplingParams,
                   response_id: str) -> tuple[Prompt, SamplingParams, ChatAnswer]:
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    prompt = await service.renderer.chat(
        body.messages, tools=None if body.tool_choice == "none" else body.tools, documents=body.documents,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message), template_kwargs=kwargs)
    parsing = Parsing(service.config, body, prompt, service.renderer.tokenizer)
    params = with_reasoning(params, parsing.end_str, body.thinking_token_budget, service.config.reasoning_parser is not None)
    return prompt, params, ChatAnswer(service, body, response_id, parsing)


async def _full(service: Service, body: ChatCompletionRequest, params: SamplingParams, response_id: str) -> dict[str, Any]:
    prompt, params, answer = await _prepare(service, body, params, response_id)
    async with service.open(response_id, [prompt], params, stream=False, timeout=body.timeout) as outputs:
        final = [output async for batch in outputs for output in batch]
    return answer.full(final[-1])


async def _stream(service: Service, body: ChatCompletionRequest, params: SamplingParams,
                  response_id: str) -> AsyncGenerator[bytes, None]:
    prompt, params, answer = await _prepare(service, body, params, response_id)
    async with service.open(response_id, [prompt], params, stream=True, timeout=body.timeout) as outputs:
        async for batch in outputs:
            if events := answer.events(batch):
                yield events
    yield answer.last()
