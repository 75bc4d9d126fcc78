"""Writes text completions: outputs of the engine in, one JSON body or a stream of events out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sparsespec.core.outputs import CompletionOutput, RequestOutput
from sparsespec.server.encoding import encode
from sparsespec.server.logprobs import LogprobWriter, prompt_logprobs
from sparsespec.server.protocol.completions import CompletionRequest
from sparsespec.server.service import Service
from sparsespec.server.sse import DONE
from sparsespec.server.usage import UsageCounter


class CompletionAnswer:
    """The answer to one request. request_ids: the engine's ids of its prompts, in order; n: completions a prompt.

    Choice n·p + i is completion i of prompt p.
    """

    def __init__(self, service: Service, body: CompletionRequest, response_id: str, request_ids: Sequence[str], n: int) -> None:
        self.body, self.id, self.n, self._service = body, response_id, n, service
        self.created, self.model = int(time.time()), body.model or service.names[0]
        self.counter = UsageCounter()
        self._place = {request_id: place for place, request_id in enumerate(request_ids)}
        self._logprobs = LogprobWriter(service.token_text, body.logprobs or 0, bool(body.return_tokens_as_token_ids))
        self._offsets: dict[int, int] = {}
        options = body.stream_options
        self._usage_last = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats
        self._base = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        self._head = "data: " + encode(self._base)[:-1] + ',"choices":['
        self._left = len(request_ids)

    def full(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of an answer that is not streamed, from the final outputs in any order."""
        choices = []
        for output in sorted(outputs, key=lambda o: self._place[o.request_id]):
            self.counter.add(output)
            for c in output.outputs:
                choice = self._choice(c, output, c.finish_reason)
                if self.body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._service.token_text)
                choices.append(choice)
        return {**self._base, "choices": choices, "usage": self.counter.usage(), **self._extras()}

    def events(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Events for what came since the last ones."""
        events: list[str] = []
        for output in outputs:
            self.counter.add(output)
            self._left -= output.finished
            for place, c in enumerate(output.outputs, 1):
                if not (c.text or c.token_ids or c.finish_reason):
                    continue
                last = not self._left and place == len(output.outputs)
                more = "," + encode(self._extras())[1:-1] if last and self.body.return_speculation else ""
                events.append(f"{self._head}{encode(self._choice(c, output, c.finish_reason))}]{self._usage()}{more}}}\n\n")
        return "".join(events).encode("utf-8", "replace")

    def last(self) -> bytes:
        """What ends the stream."""
        if not self._usage_last:
            return DONE
        return (self._head + '],"usage":' + encode(self.counter.usage()) + "}\n\n").encode() + DONE

    def _usage(self) -> str:
        if self._usage_always:
            return ',"usage":' + encode(self.counter.usage())
        return ',"usage":null' if self._usage_last else ""

    def _choice(self, c: CompletionOutput, output: RequestOutput, reason: str | None) -> dict[str, Any]:
        index = self._place[output.request_id] * self.n + c.index
        first = index not in self._offsets
        text = c.text
        if first and self.body.echo:
            text = self._prompt_text(output) + text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": self._text_logprobs(index, first, c, output),
                                  "finish_reason": reason, "stop_reason": c.stop_reason}
        if self.body.return_token_ids:
            choice["token_ids"] = c.token_ids
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        self._offsets.setdefault(index, 0)
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._service.renderer.decode(output.prompt_token_ids)

    def _text_logprobs(self, index: int, first: bool, c: CompletionOutput, output: RequestOutput) -> dict[str, Any] | None:
        if c.logprobs is None:
            return None
        ids, rows = list(c.token_ids), list[Any](c.logprobs)
        offset = self._offsets.get(index, 0)
        if first and self.body.echo and output.prompt_logprobs is not None:
            ids, rows = output.prompt_token_ids + ids, list(output.prompt_logprobs) + rows
        written, self._offsets[index] = self._logprobs.text(ids, rows, offset)
        return written

    def _extras(self) -> dict[str, Any]:
        return {"speculation": self.counter.speculation()} if self.body.return_speculation else {}
