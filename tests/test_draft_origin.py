"""Which text accepted drafts wrote: exact for every split, with held-back bytes, stop strings and tags."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving import Running, byte_tokenizer, events, offline, serving
from sparsespec import SamplingParams
from sparsespec.core.outputs import CompletionOutput
from sparsespec.server.draft_origin import DraftOrigin
from sparsespec.server.parsing import ChoiceParser
from sparsespec.server.reasoning import make_reasoning_parser

TAG = "<think>"


def runs(flags: list[bool]) -> list[tuple[int, bool]]:
    return [(len(list(run)), flag) for flag, run in groupby(flags)]


def flat(spans: list[Any]) -> list[bool]:
    return [flag for count, flag in spans for _ in range(count)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_split_gives_the_same(data: st.DataObject) -> None:
    """Bytes are tokens here: a character is of the token of its last byte; the engine may hold text back as it likes."""
    thought, said = (data.draw(st.text(st.sampled_from("a<t/é😀 "), max_size=12)) for _ in range(2))
    text = f"{TAG}{thought}</think>{said}"
    ids = byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
    flags = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    pieces = [byte_tokenizer().decode(ids[:i + 1]).rstrip("\ufffd") for i in range(len(ids))]
    owners = [next(flag for piece, flag in zip(pieces, flags, strict=True) if len(piece) > place) for place in range(len(text))]
    end_of_thought = len(TAG) + len(thought)
    expected = {"reasoning": owners[len(TAG):end_of_thought], "content": owners[end_of_thought + len("</think>"):]}

    origin = DraftOrigin(byte_tokenizer(), [], ChoiceParser(make_reasoning_parser("qwen3"), None), True, True)
    found: dict[str, list[bool]] = {"reasoning": [], "content": []}
    texts, at, chars = {"reasoning": "", "content": ""}, 0, 0
    while at < len(ids):
        step = data.draw(st.integers(1, 6))
        block, marks = ids[at:at + step], flags[at:at + step]
        at += step
        done = at >= len(ids)
        end = len(text) if done else data.draw(st.integers(chars, max(chars, len(pieces[min(at, len(ids)) - 1]))))
        piece, spans = origin.feed(CompletionOutput(0, text[chars:end], block, from_draft=marks), done)
        chars = end
        texts["reasoning"] += piece.reasoning
        texts["content"] += piece.content
        for name, values in spans.items():
            found[name] += flat(values)
    assert texts == {"reasoning": thought, "content": said}
    assert found == expected


def test_broken_bytes_at_the_end_have_an_owner() -> None:
    ids = byte_tokenizer()("a😀", add_special_tokens=False)["input_ids"][:3]
    origin = DraftOrigin(byte_tokenizer(), [], ChoiceParser(None, None), True, True)
    text = byte_tokenizer().decode(ids)
    piece, spans = origin.feed(CompletionOutput(0, text, ids, from_draft=[True, True, False]), True)
    assert (piece.content, spans) == (text, {"content": [(1, True), (len(text) - 1, False)]})


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 4}, {"seed": 2, "stop": ["t", "e"]}], ids=str)
def test_tokens_of_the_engine(params: dict[str, Any]) -> None:
    """As many as the request's statistics say, less the ones that a stop string cut off, and the increments joined."""
    llm = offline()
    whole = llm.generate("Why?", SamplingParams(max_tokens=60, **params), use_tqdm=False)[0]
    out = whole.outputs[0]
    assert len(out.from_draft) == len(out.token_ids)
    assert whole.metrics is not None
    assert sum(out.from_draft) <= whole.metrics.num_accepted_tokens
    if "stop" not in params:
        assert sum(out.from_draft) == whole.metrics.num_accepted_tokens > 0
    plain = offline(speculative_config={"method": "none"}).generate("Why?", SamplingParams(max_tokens=60, **params), use_tqdm=False)
    assert plain[0].outputs[0].from_draft == [False] * len(out.token_ids)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.mark.parametrize("extra", [{}, {"n": 2, "seed": 5}, {"stop": True}, {"temperature": 0}], ids=str)
def test_streamed_spans_are_the_answers(server: Running, extra: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "seed": 7, "return_draft_spans": True, **extra}
    if "stop" in extra:  # one from the answer, and one that it only begins, for which text is held back
        said = server.post("/v1/chat/completions", {**body, "stop": None}).json()["choices"][0]["message"]["content"]
        body["stop"] = [said[20:23], said[8:14] + "no"]
    whole = server.post("/v1/chat/completions", body).json()
    *chunks, _ = events(server.post("/v1/chat/completions", {**body, "stream": True}))
    for choice in whole["choices"]:
        mine = [c for e in chunks for c in e["choices"] if c["index"] == choice["index"]]
        for c in mine:
            assert len(flat(c.get("draft_spans", {}).get("content", []))) == len(c["delta"].get("content") or "")
        spans = flat([s for c in mine for s in c.get("draft_spans", {}).get("content", [])])
        assert "".join(c["delta"].get("content") or "" for c in mine) == choice["message"]["content"]
        assert [list(r) for r in runs(spans)] == choice["draft_spans"]["content"]


def test_not_with_tools(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "return_draft_spans": True}
    tool = {"type": "function", "function": {"name": "f"}}
    refused = server.post("/v1/chat/completions", {**body, "tools": [tool]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_draft_spans")
