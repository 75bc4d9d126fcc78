"""One streamed request to an OpenAI-compatible server, and when each part of its answer came."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from sparsespec.core.errors import InvalidValueError

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass
class Answer:
    """Seconds from its sending: ttft to the first text, itl between events with text, latency to the end. error: why it failed."""

    start: float = 0.0  # since the benchmark's start
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float:
        """Mean seconds a token after the first."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class Client:
    """Sends the requests of one benchmark. base: what every body holds besides its prompt."""

    def __init__(self, url: str, backend: str, endpoint: str | None, base: dict[str, Any], api_key: str | None) -> None:
        self.backend, self.endpoint, self.base = backend, endpoint or ENDPOINTS[backend], base
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=None,
                                      limits=httpx.Limits(max_connections=None, max_keepalive_connections=None))

    async def model(self) -> str:
        """The first model that the server has. Raises InvalidValueError where there is no server, or it refuses."""
        try:
            answer = await self.http.get("/v1/models")
        except httpx.HTTPError as e:
            raise InvalidValueError("base_url", str(self.http.base_url), f"no server answers there ({type(e).__name__}: {e})",
                                    "Start one with sparsespec serve, or give --base-url or --port") from e
        if answer.status_code != httpx.codes.OK:
            locked = answer.status_code == httpx.codes.UNAUTHORIZED
            raise InvalidValueError("base_url", str(self.http.base_url), f"/v1/models: {answer.status_code} {answer.text[:200]}",
                                    "Give the key of the server with --api-key" if locked
                                    else "Give the address of an OpenAI-compatible server")
        return str(answer.json()["data"][0]["id"])

    async def metrics(self) -> str:
        """The server's Prometheus page, "" where it has none."""
        try:
            answer = await self.http.get("/metrics")
        except httpx.HTTPError:
            return ""
        return answer.text if answer.status_code == httpx.codes.OK else ""

    def body(self, prompt: str | list[int], max_tokens: int) -> dict[str, Any]:
        """What is sent for one prompt."""
        what = {"prompt": prompt} if self.backend == "openai" else {"messages": [{"role": "user", "content": prompt}]}
        return {**self.base, **what, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}

    async def send(self, prompt: str | list[int], max_tokens: int, began: float) -> Answer:
        """Send a prompt and read its stream; `began`: the benchmark's start by time.perf_counter()."""
        out = Answer(start=time.perf_counter() - began)
        sent = time.perf_counter()
        try:
            async with self.http.stream("POST", self.endpoint, json=self.body(prompt, max_tokens)) as stream:
                if stream.status_code != httpx.codes.OK:
                    out.error = f"{stream.status_code}: {(await stream.aread()).decode(errors='replace')[:300]}"
                    return out
                await _read(stream, out, sent)
        except (httpx.HTTPError, json.JSONDecodeError) as e:
            out.error = f"{type(e).__name__}: {e}"
        return out


async def _read(stream: httpx.Response, out: Answer, sent: float) -> None:
    last, done = sent, False
    async for line in stream.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue
        if data == "[DONE]":
            done = True
            break
        event = json.loads(data)
        if "error" in event:
            out.error = json.dumps(event["error"])[:300]
            return
        text = _text(event)
        if text:
            now = time.perf_counter()
            if out.text:
                out.itl.append(now - last)
            else:
                out.ttft = now - sent
            out.text, last = out.text + text, now
        if usage := event.get("usage"):
            out.prompt_tokens, out.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    out.latency = time.perf_counter() - sent
    if not done:
        out.error = "the stream ended before [DONE]"
    elif not out.text:
        out.ttft = out.latency


def _text(event: dict[str, Any]) -> str:
    """Text of an event of either API; reasoning counts, as its tokens were waited for too."""
    parts = []
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        parts.append(choice.get("text") or delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or "")
    return "".join(parts)
