"""Tool call parsers: the same calls and content for every split of the text, and nothing lost."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsespec.core.errors import InvalidValueError
from sparsespec.server.tools import HermesToolParser, make_tool_parser

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'
Found = tuple[str, list[tuple[int, str, str, str]]]


def names() -> Iterator[str]:
    n = 0
    while True:
        yield f"id{n}"
        n += 1


def parse(pieces: list[str]) -> Found:
    """Content, and (index, id, name, arguments) of each call."""
    parser = HermesToolParser(names().__next__)
    content, calls = "", []
    for i, piece in enumerate(pieces):
        text, found = parser.feed(piece, finished=i == len(pieces) - 1)
        content += text
        calls += [(c.index, c.id, c.name, c.arguments) for c in found]
    return content, calls


ADDED = (0, "id0", "add", '{"a": 1, "b": [2, "x"]}')
CASES: list[tuple[str, Found]] = [
    (ADD, ("", [ADDED])),
    (f"\n{ADD}\n", ("", [ADDED])),
    (f"I add.\n{ADD}", ("I add.\n", [ADDED])),
    (f"{ADD}\n<tool_call>{{\"name\": \"now\"}}</tool_call>\nDone.", ("\nDone.", [ADDED, (1, "id1", "now", "{}")])),
    ("just <tool text </tool_call>", ("just <tool text </tool_call>", [])),
    (" \n ", (" \n ", [])),
    ("<tool_call>{broken</tool_call>", ("<tool_call>{broken</tool_call>", [])),
    (f" <tool_call>oops {ADD}", (" <tool_call>oops ", [ADDED])),
    ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', [])),
    ('<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', [])),
    ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
     ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', [])),
    ('<tool_call>[1]</tool_call>', ("<tool_call>[1]</tool_call>", [])),
    ('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
     ("", [(0, "id0", "f", '{"x": "</tool_call>"}')])),
    (f'<tool_call>{{"name": "f</tool_call> {ADD}', ('<tool_call>{"name": "f</tool_call> ', [ADDED])),
    ('<tool_call>{"arguments": {"x": 1e400, "é": "\\u00e9"}, "name":"f"}</tool_call>',
     ("", [(0, "id0", "f", '{"x": 1e400, "é": "\\u00e9"}')])),
    ('a <tool_call>{"name": "f", "arguments": {}}', ("a ", [(0, "id0", "f", "{}")])),
    ('<tool_call>{"name": "f", "argu', ('<tool_call>{"name": "f", "argu', [])),
    ("<tool_call>", ("<tool_call>", [])),
    ("<tool_c", ("<tool_c", [])),
    ("", ("", [])),
]


@pytest.mark.parametrize(("text", "wanted"), CASES)
def test_every_split_gives_the_same_calls(text: str, wanted: Found) -> None:
    assert parse([text]) == wanted
    for size in range(1, 9):
        assert parse([text[i:i + size] for i in range(0, len(text), size)] or [""]) == wanted


_PIECES = st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "b"}}', '{"name": "', "{", "}", '"',
                           "<", "\n", "<tool", "_call>", "text", " ", "😀", ADD])


@settings(max_examples=400, deadline=None)
@given(st.lists(_PIECES, max_size=10), st.data())
def test_random_texts_and_splits(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    split = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = parse([text])
    assert parse(split) == parse(pieces or [""]) == (content, calls)
    for _, _, _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)
    if not calls:
        assert content == text


def test_content_does_not_wait_for_the_end() -> None:
    parser = make_tool_parser("hermes")
    assert parser.feed("Hello <to") == ("Hello ", [])
    assert parser.feed("ol") == ("", [])
    assert parser.feed("s>") == ("<tools>", [])
    content, calls = parser.feed(ADD)
    assert (content, [c.name for c in calls]) == ("", ["add"])
    assert calls[0].id.startswith("chatcmpl-tool-")


def test_unknown_names_are_listed() -> None:
    with pytest.raises(InvalidValueError, match="hermes"):
        make_tool_parser("pythonic")
