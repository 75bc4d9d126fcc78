"""What stands before every endpoint: keys, and the size of bodies. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparsespec.server.errors import error_body, error_response

# Paths that need no key: probes, monitoring and documentation. Everything else does.
_OPEN = frozenset({"/health", "/version", "/metrics", "/stats", "/dashboard", "/docs", "/openapi.json"})


class RequireKey:
    """401 for requests without one of the keys, compared in constant time. `keys` empty: everybody may come in."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (scope["type"] != "http" or not self._digests or scope["method"] == "OPTIONS" or scope["path"] in _OPEN
                or self._known(scope)):
            await self.app(scope, receive, send)
            return
        body = error_body(401, "Authorization: no valid API key was given. Send it as `Authorization: Bearer KEY`", "Authorization")
        await error_response(401, body, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, whichever matches
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    """All of equal length, so that a comparison says nothing about a key's own."""
    return hashlib.sha256(key).digest()


class LimitBody:
    """413 for bodies of more than `max_bytes`, whether they say so beforehand or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if length.isdigit() and int(length) > self.max_bytes:
            body = error_body(413, self._message())
            await error_response(413, body, {"Connection": "close"})(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise HTTPException(413, self._message(), {"Connection": "close"})
            return message

        await self.app(scope, counted, send)

    def _message(self) -> str:
        return f"body: larger than {self.max_bytes} bytes. Send less, or raise --max-body-mib"
