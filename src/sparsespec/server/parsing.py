"""From a choice's text to what a chat answer is made of: reasoning, content, tool calls. The same for any split of the text."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparsespec.config.server import ServerConfig
from sparsespec.core.errors import UnsupportedError
from sparsespec.server.protocol.chat import ChatCompletionRequest
from sparsespec.server.protocol.common import NamedTool
from sparsespec.server.reasoning import ReasoningParser, ends_in_thinking, make_reasoning_parser
from sparsespec.server.render import Prompt
from sparsespec.server.tools import ToolCallDelta, make_tool_parser


@dataclass(frozen=True)
class CallDelta:
    """A part of a forced call. id, name: None after its first one."""

    index: int
    id: str | None
    name: str | None
    arguments: str


AnyCallDelta = ToolCallDelta | CallDelta


class ToolParser(Protocol):
    """What finds calls in a text."""

    def feed(self, delta_text: str, finished: bool = False) -> tuple[str, Sequence[AnyCallDelta]]: ...


class NamedCall:
    """All of the text is the arguments of the one tool that tool_choice names."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, delta_text: str, finished: bool = False) -> tuple[str, list[CallDelta]]:
        if self._name is None:
            return "", [CallDelta(0, None, None, delta_text)] if delta_text else []
        if not delta_text:
            return "", []
        name, self._name = self._name, None
        return "", [CallDelta(0, _call_id(), name, delta_text)]


class RequiredCalls:
    """The text is a JSON list of calls, known when it is complete. One that was cut short stays content."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, delta_text: str, finished: bool = False) -> tuple[str, list[CallDelta]]:
        self._text += delta_text
        if not finished:
            return "", []
        try:
            calls = json.loads(self._text)
            return "", [CallDelta(i, _call_id(), call["name"], json.dumps(call["parameters"], ensure_ascii=False))
                        for i, call in enumerate(calls)]
        except (ValueError, KeyError, TypeError, RecursionError):
            return self._text, []


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


@dataclass
class Piece:
    """What a piece of text adds to a choice."""

    reasoning: str = ""
    content: str = ""
    calls: list[AnyCallDelta] = field(default_factory=list)


class ChoiceParser:
    """Splits one choice's text. Without parsers all of it is content. one_call: calls after the first are left out."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, one_call: bool = False) -> None:
        self.reasoning, self.tools, self.one_call = reasoning, tools, one_call
        self.num_calls = 0

    @property
    def held(self) -> int:
        """Characters that the search for reasoning holds back; the search for tools may hold back others."""
        return self.reasoning.held if self.reasoning is not None else 0

    def feed(self, text: str, finished: bool) -> Piece:
        """What became certain with the next piece of text."""
        reasoning, content = self.reasoning.feed(text, finished) if self.reasoning is not None else ("", text)
        if self.tools is None:
            return Piece(reasoning, content)
        content, found = self.tools.feed(content, finished)
        calls = [c for c in found if not (self.one_call and c.index)]
        self.num_calls = max([self.num_calls, *(c.index + 1 for c in calls)])
        return Piece(reasoning, content, calls)


class Parsing:
    """How the choices of one chat request are parsed.

    count_reasoning: token ids → how many are reasoning, None where reasoning is not parsed. end_str: what ends the reasoning
    that the output begins with or may begin with; None where there is none. calls_end: the finish_reason of a choice that
    called tools.
    """

    def __init__(self, config: ServerConfig, body: ChatCompletionRequest, prompt: Prompt, tokenizer: Any) -> None:
        text = str(prompt["prompt"])
        self._reasoning = _reasoning_factory(config, text, tokenizer)
        self._tools = _tool_factory(config, body)
        self._one_call = body.parallel_tool_calls is False
        self.calls_end = "stop" if isinstance(body.tool_choice, NamedTool) else "tool_calls"
        self.count_reasoning: Callable[[Sequence[int]], int] | None = None
        self.end_str: str | None = None
        if self._reasoning is not None:
            parser = self._reasoning()
            self.count_reasoning = parser.reasoning_tokens
            self.end_str = parser.end_str if not text.rstrip().endswith(parser.end_str) else None

    def choice(self) -> ChoiceParser:
        """A parser for one choice."""
        return ChoiceParser(self._reasoning() if self._reasoning is not None else None,
                            self._tools() if self._tools is not None else None, self._one_call)


def _reasoning_factory(config: ServerConfig, prompt: str, tokenizer: Any) -> Callable[[], ReasoningParser] | None:
    name = config.reasoning_parser
    if name is None:
        return None
    opened = ends_in_thinking(prompt, name)
    return lambda: make_reasoning_parser(name, tokenizer, prompt_ends_in_thinking=opened)


def _tool_factory(config: ServerConfig, body: ChatCompletionRequest) -> Callable[[], ToolParser] | None:
    """None where no call is looked for. Raises UnsupportedError where calls are asked for that the server is not set up for."""
    if not body.tools or body.tool_choice == "none":
        return None
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return lambda: NamedCall(choice.function.name)
    if choice == "required":
        return RequiredCalls
    name = config.tool_call_parser
    if name is None or not config.enable_auto_tool_choice:
        if choice is None:  # the model sees the tools; what it makes of them stays text
            return None
        raise UnsupportedError("tool_choice", choice, "the server does not look for tool calls",
                               "Start it with --enable-auto-tool-choice and --tool-call-parser, or name a tool")
    return lambda: make_tool_parser(name)
