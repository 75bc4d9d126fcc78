"""Writes chat answers: outputs of the engine in, one JSON body or a stream of events out."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sparsespec.core.outputs import CompletionOutput, RequestOutput
from sparsespec.server.draft_origin import DraftOrigin, Spans
from sparsespec.server.encoding import encode
from sparsespec.server.logprobs import LogprobWriter, prompt_logprobs
from sparsespec.server.parsing import AnyCallDelta, ChoiceParser, Parsing, Piece
from sparsespec.server.protocol.chat import ChatCompletionRequest
from sparsespec.server.service import Service
from sparsespec.server.sse import DONE
from sparsespec.server.usage import UsageCounter


class ChatAnswer:
    """The answer to one chat request."""

    def __init__(self, service: Service, body: ChatCompletionRequest, response_id: str, parsing: Parsing) -> None:
        self.body, self.id, self.parsing, self._service = body, response_id, parsing, service
        self.created, self.model = int(time.time()), body.model or service.names[0]
        self.counter = UsageCounter(parsing.count_reasoning)
        self._logprobs = LogprobWriter(service.token_text, body.top_logprobs or 0, bool(body.return_tokens_as_token_ids))
        self._parsers: defaultdict[int, ChoiceParser] = defaultdict(parsing.choice)
        self._origins: dict[int, DraftOrigin] = {}
        self._show_reasoning = body.include_reasoning is not False
        options = body.stream_options
        self._usage_last = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats
        head = {"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model}
        self._head = "data: " + encode(head)[:-1] + ',"choices":['
        self._begun: set[int] = set()

    # -- in one piece --------------------------------------------------------------------------------------------

    def full(self, output: RequestOutput) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        self.counter.add(output)
        answer: dict[str, Any] = {"id": self.id, "object": "chat.completion", "created": self.created, "model": self.model,
                                  "choices": [self._full_choice(c, output) for c in output.outputs], "usage": self.counter.usage()}
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._service.token_text)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer | self._extras()

    def _full_choice(self, c: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        piece, spans = self._parse(c, output, finished=True)
        message: dict[str, Any] = {"role": "assistant", "content": piece.content, "refusal": None}
        if self.parsing.count_reasoning is not None and self._show_reasoning:
            message |= {"reasoning": piece.reasoning or None, "reasoning_content": piece.reasoning or None}
        calls = _join_calls(piece.calls)
        if calls:
            message |= {"content": piece.content or None, "tool_calls": calls}
        choice = {"index": c.index, "message": message, "logprobs": self._chat_logprobs(c),
                  "finish_reason": self._reason(c), "stop_reason": c.stop_reason}
        return choice | ({"token_ids": c.token_ids} if self.body.return_token_ids else {}) | self._spans(spans)

    # -- in events -----------------------------------------------------------------------------------------------

    def events(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Events for what came since the last ones; empty where it amounts to nothing."""
        events: list[str] = []
        for output in outputs:
            self.counter.add(output)
            for c in output.outputs:
                events += self._choice_events(c, output)
        return "".join(events).encode("utf-8", "replace")

    def last(self) -> bytes:
        """What ends the stream."""
        if not self._usage_last:
            return DONE
        return (self._head + '],"usage":' + encode(self.counter.usage()) + "}\n\n").encode() + DONE

    def _choice_events(self, c: CompletionOutput, output: RequestOutput) -> list[str]:
        finished = c.finish_reason is not None
        piece, spans = self._parse(c, output, finished)
        events = []
        if c.index not in self._begun:
            self._begun.add(c.index)
            first = {"index": c.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            extra = {"prompt_token_ids": output.prompt_token_ids} if self.body.return_token_ids else {}
            events.append(self._event(first, extra))
        delta = self._delta(piece)
        logprobs = self._chat_logprobs(c) if c.token_ids else None
        if delta or finished or logprobs is not None or (self.body.return_token_ids and c.token_ids):
            choice: dict[str, Any] = {"index": c.index, "delta": delta, "logprobs": logprobs,
                                      "finish_reason": self._reason(c) if finished else None}
            if finished:
                choice["stop_reason"] = c.stop_reason
            if self.body.return_token_ids:
                choice["token_ids"] = c.token_ids
            choice |= self._spans(spans)
            events.append(self._event(choice, self._extras() if output.finished else {}))
        return events

    def _event(self, choice: dict[str, Any], extra: dict[str, Any]) -> str:
        """One event. `extra` holds fields of the chunk besides the usual ones."""
        usage = ""
        if self._usage_always:
            usage = ',"usage":' + encode(self.counter.usage())
        elif self._usage_last:
            usage = ',"usage":null'
        more = "," + encode(extra)[1:-1] if extra else ""
        return f"{self._head}{encode(choice)}]{usage}{more}}}\n\n"

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.reasoning and self._show_reasoning:
            delta |= {"reasoning": piece.reasoning, "reasoning_content": piece.reasoning}
        if piece.content:
            delta["content"] = piece.content
        if piece.calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
        return delta

    # -- both ----------------------------------------------------------------------------------------------------

    def _parse(self, c: CompletionOutput, output: RequestOutput, finished: bool) -> tuple[Piece, Spans]:
        """What the text of an output is made of, and, where that was asked for, which of it accepted drafts wrote."""
        parser = self._parsers[c.index]
        if not self.body.return_draft_spans:
            return parser.feed(c.text, finished), {}
        if c.index not in self._origins:
            self._origins[c.index] = DraftOrigin(self._service.renderer.tokenizer, output.prompt_token_ids, parser,
                                                 self.body.skip_special_tokens is not False,
                                                 self.body.spaces_between_special_tokens is not False)
        return self._origins[c.index].feed(c, finished)

    def _spans(self, spans: Spans) -> dict[str, Any]:
        shown = {name: runs for name, runs in spans.items() if name == "content" or self._show_reasoning}
        return {"draft_spans": shown} if shown else {}

    def _chat_logprobs(self, c: CompletionOutput) -> dict[str, Any] | None:
        return self._logprobs.chat(c.token_ids, c.logprobs) if c.logprobs is not None else None

    def _reason(self, c: CompletionOutput) -> str | None:
        if c.finish_reason == "stop" and self._parsers[c.index].num_calls:
            return self.parsing.calls_end
        return c.finish_reason

    def _extras(self) -> dict[str, Any]:
        return {"speculation": self.counter.speculation()} if self.body.return_speculation else {}


def _call_delta(call: AnyCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _join_calls(deltas: Sequence[AnyCallDelta]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for d in deltas:
        call = calls.setdefault(d.index, {"id": d.id, "type": "function", "function": {"name": d.name, "arguments": ""}})
        call["function"]["arguments"] += d.arguments
    return [calls[index] for index in sorted(calls)]
