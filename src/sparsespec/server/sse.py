"""Responses that end when their client does: server-sent events, and work that is cancelled when nobody waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparsespec.server.encoding import json_bytes
from sparsespec.server.errors import ClientGoneError, body_of

T = TypeVar("T")
log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and give its result; cancel it and raise ClientGoneError as soon as the client closes the connection."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for future in (task, watch):
            future.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await future


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what a generator yields, each chunk one or more events.

    The response starts with the first chunk, so that errors before it get a status of their own; a later one becomes an
    event that holds the error, then [DONE]. The generator is closed when the client goes.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        super().__init__(headers={**_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGoneError):
            await while_connected(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        started = False
        try:
            async with aclosing(self.chunks) as chunks:
                async for chunk in chunks:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        started = True
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            if not started:
                raise
            log.warning("A stream ended with an error: %s", error)
            await send({"type": "http.response.body", "body": b"data: " + json_bytes(body_of(error)) + b"\n\n" + DONE,
                        "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
