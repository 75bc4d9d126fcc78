"""What the endpoints share: the engine, the prompts' renderer, names, and the responses that are being written."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from sparsespec.config.server import ServerConfig
from sparsespec.core.errors import InvalidValueError
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.engine.async_engine import AsyncEngine, Submission
from sparsespec.engine.streams import OutputStream
from sparsespec.metrics.prometheus import ServerMetrics
from sparsespec.server.errors import ModelNotFoundError, error_body
from sparsespec.server.protocol.common import ErrorResponse
from sparsespec.server.render import Prompt, Renderer
from sparsespec.server.token_text import TokenText

_ID = re.compile(r"[\w.:\-]{1,128}")
KINDS = ("chatcmpl-", "cmpl-")  # how the ids of responses begin


@dataclass
class Service:
    """names: what requests may call the model; the first is what responses call it. defaults: of SamplingParams, for what
    requests leave open. active: response id → the engine's ids.
    """

    engine: AsyncEngine
    config: ServerConfig
    renderer: Renderer
    token_text: TokenText
    metrics: ServerMetrics
    names: list[str]
    defaults: dict[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    active: dict[str, list[str]] = field(default_factory=dict)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError for a name that is not served."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError("model", name, "not served here", f"Use one of: {', '.join(self.names)}")

    def response_id(self, kind: str, request: Request, given: str | None) -> str:
        """Id of a response: the caller's, from the body or the X-Request-Id header, else a random one."""
        header = request.headers.get("x-request-id")
        if given is None and header is not None and _ID.fullmatch(header):
            given = header
        return f"{kind}{given or uuid.uuid4().hex}"

    @asynccontextmanager
    async def open(self, response_id: str, prompts: Sequence[Prompt], params: SamplingParams, *, stream: bool,
                   timeout: float | None) -> AsyncGenerator[OutputStream, None]:
        """Run prompts for one response; leaving aborts what still runs. Engine ids are the response's, with -i for several."""
        if response_id in self.active:
            raise InvalidValueError("request_id", response_id, "already in use", "Give each request an id of its own")
        ids = [response_id] if len(prompts) == 1 else [f"{response_id}-{i}" for i in range(len(prompts))]
        self.active[response_id] = ids
        try:
            submissions = [Submission(i, prompt, params) for i, prompt in zip(ids, prompts, strict=True)]
            async with await self.engine.submit(submissions, stream=stream, timeout=timeout) as outputs:
                yield outputs
        finally:
            del self.active[response_id]


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(_service)]


def error_docs(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of an endpoint's errors."""
    example = error_body(400, "temperature=-1: negative. Give 0 for greedy, or a positive value", "temperature")
    return {status: {"model": ErrorResponse, "content": {"application/json": {"example": example}}} for status in statuses}
