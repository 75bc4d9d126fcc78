"""Finds tool calls in a model's text, while it streams.

    parser = make_tool_parser("hermes")
    content, calls = parser.feed('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', finished=True)

The joined content and the joined arguments are the same however the text is cut. A call is given out when its closing
tag is there (or the text ends and the call is complete), since only then is it known to be one: what turns out to be
malformed comes back as content, tags included, so nothing is lost. The arguments are as the model wrote them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparsespec.core.errors import InvalidValueError
from sparsespec.server.reasoning import held_back

_START, _END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCallDelta:
    """OpenAI's fields: index of the call in the message, its id and name, and a fragment of its arguments, JSON as text."""

    index: int
    id: str
    name: str
    arguments: str


def _new_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


class HermesToolParser:
    """Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them.

    Other text is content, before, between and after calls, save white space that stands alone there. A closing tag inside
    a JSON string does not close.
    """

    def __init__(self, new_id: Callable[[], str] = _new_id) -> None:
        self.num_calls = 0
        self._new_id = new_id
        self._pending = ""  # not decided yet; after an opening tag if `_inside`
        self._inside = False
        self._space = ""  # white space that is content if other text follows it before a call does
        self._bare = True  # no text but white space since the last call

    def feed(self, delta_text: str, finished: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """(content, calls) that became certain with the next piece of text; with `finished` all that was held back."""
        self._pending += delta_text
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        while self._inside or _START in self._pending:
            if not self._inside:
                before, _, self._pending = self._pending.partition(_START)
                content.append(self._text(before))
                self._inside = True
            verdict = self._close(finished)
            if verdict is None:
                return "".join(content), calls
            self._inside = False
            if isinstance(verdict, ToolCallDelta):
                calls.append(verdict)
                self._space, self._bare = "", True
            else:
                content.append(self._text(_START))
        keep = 0 if finished else held_back(self._pending, _START)
        content.append(self._text(self._pending[:len(self._pending) - keep]))
        self._pending = self._pending[len(self._pending) - keep:]
        if finished and not self.num_calls:
            content.append(self._space)
            self._space = ""
        return "".join(content), calls

    def _text(self, text: str) -> str:
        """What of a piece of content can be given out."""
        if self._bare and not text.strip():
            self._space += text
            return ""
        text, self._space, self._bare = self._space + text, "", False
        return text

    def _close(self, finished: bool) -> ToolCallDelta | bool | None:
        """The call that the pending text begins with, which it is then cut off; False if it is none; None: not known yet."""
        end = self._pending.find(_END)
        while end >= 0:
            call = self._call(self._pending[:end])
            if call is not None:
                self._pending = self._pending[end + len(_END):]
                return call
            if not _in_string(self._pending[:end]):
                return False
            end = self._pending.find(_END, end + 1)
        if not finished:
            return None
        call = self._call(self._pending)
        if call is None:
            return False
        self._pending = ""
        return call

    def _call(self, body: str) -> ToolCallDelta | None:
        members = _members(body)
        if members is None or "name" not in members:
            return None
        name, arguments = members["name"][1], members.get("arguments", ("{}", {}))
        if not isinstance(name, str) or not name or not isinstance(arguments[1], dict):
            return None
        self.num_calls += 1
        return ToolCallDelta(self.num_calls - 1, self._new_id(), name, arguments[0])


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_SPACE = " \t\n\r"


def _members(text: str) -> dict[str, tuple[str, Any]] | None:
    """The members of a JSON object, each as it is written and as a value; None if the text is not one, with nothing after it."""
    text = text.strip(_SPACE)
    try:
        if not isinstance(_DECODER.decode(text), dict):
            return None
    except (ValueError, RecursionError):
        return None
    members: dict[str, tuple[str, Any]] = {}
    at = _skip(text, 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)  # past the colon
        value, end = _DECODER.raw_decode(text, start)
        members[key] = text[start:end], value
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return members


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def _in_string(text: str) -> bool:
    """Whether JSON breaks off inside a string."""
    try:
        _DECODER.decode(text)
    except json.JSONDecodeError as e:
        return e.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False


_PARSERS: dict[str, Callable[[], HermesToolParser]] = {"hermes": HermesToolParser}


def make_tool_parser(name: str) -> HermesToolParser:
    """A parser for one completion. Raises InvalidValueError for an unknown name."""
    if name not in _PARSERS:
        raise InvalidValueError("tool_call_parser", name, "not a known tool call parser", f"Known: {', '.join(sorted(_PARSERS))}")
    return _PARSERS[name]()
