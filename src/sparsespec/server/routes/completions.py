"""/v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sparsespec.core.errors import InvalidValueError, UnsupportedError
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.server.completion_answer import CompletionAnswer
from sparsespec.server.encoding import json_bytes
from sparsespec.server.params import completion_params
from sparsespec.server.protocol.completions import CompletionRequest, CompletionResponse
from sparsespec.server.render import Prompt
from sparsespec.server.service import Served, Service, error_docs
from sparsespec.server.sse import EventStream, while_connected

router = APIRouter()


@router.post("/v1/completions", response_model=CompletionResponse, responses=error_docs(400, 401, 404, 413, 429, 500, 503, 504))
async def create_completion(body: CompletionRequest, request: Request, service: Served) -> Response:
    """Continue one prompt or several; streamed as server-sent events where `stream` is true."""
    service.check_model(body.model)
    params = completion_params(body, service.defaults)
    if body.stream and params.prompt_logprobs is not None:
        raise UnsupportedError("prompt_logprobs", params.prompt_logprobs, "not available in a stream (nor is echo with logprobs)",
                               "Set stream to false")
    response_id = service.response_id("cmpl-", request, body.request_id)
    headers = {"x-request-id": response_id}
    if body.stream:
        return EventStream(_stream(service, body, params, response_id), headers)
    answer = await while_connected(request.receive, _full(service, body, params, response_id))
    return Response(json_bytes(answer), headers=headers, media_type="application/json")


async def _prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    """The prompts as token ids. A flat list of integers is one prompt."""
    given = body.prompt
    many: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if not many:
        raise InvalidValueError("prompt", given, "empty", "Give text or token ids")
    if len(many) > service.config.max_prompts:
        raise InvalidValueError("prompt", f"{len(many)} prompts", f"more than {service.config.max_prompts}",
                                "Send several requests, or raise --max-prompts")
    special = body.add_special_tokens is not False
    return [await service.renderer.text(p, special) if isinstance(p, str) else {"prompt_token_ids": p} for p in many]


def _answer(service: Service, body: CompletionRequest, response_id: str, request_ids: list[str]) -> CompletionAnswer:
    return CompletionAnswer(service, body, response_id, request_ids, 1 if body.n is None else body.n)


async def _full(service: Service, body: CompletionRequest, params: SamplingParams, response_id: str) -> dict[str, Any]:
    prompts = await _prompts(service, body)
    async with service.open(response_id, prompts, params, stream=False, timeout=body.timeout) as outputs:
        answer = _answer(service, body, response_id, outputs.request_ids)
        final = [output async for batch in outputs for output in batch]
    return answer.full(final)


async def _stream(service: Service, body: CompletionRequest, params: SamplingParams,
                  response_id: str) -> AsyncGenerator[bytes, None]:
    prompts = await _prompts(service, body)
    async with service.open(response_id, prompts, params, stream=True, timeout=body.timeout) as outputs:
        answer = _answer(service, body, response_id, outputs.request_ids)
        async for batch in outputs:
            if events := answer.events(batch):
                yield events
    yield answer.last()
