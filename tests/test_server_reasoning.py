"""Reasoning, tool calls and structured output over HTTP: T38, and answers that hold to their form after the thinking."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from serving import SPECIAL, VOCAB, Running, byte_tokenizer, events, serving, tiny_loaded
from sparsespec.config import ServerConfig
from sparsespec.server.reasoning import make_reasoning_parser
from sparsespec.testing import override_drafts, scripted

END = byte_tokenizer().convert_tokens_to_ids(SPECIAL[0])
CONFIG = ServerConfig(reasoning_parser="qwen3", tool_call_parser="hermes", enable_auto_tool_choice=True)
MESSAGES = [{"role": "user", "content": "P"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}}}


def ids_of(text: str) -> list[int]:
    return list(byte_tokenizer()(text, add_special_tokens=False)["input_ids"])


@contextmanager
def saying(text: str, k: int, prompt: str = "<|user|>P\n<|assistant|>", config: ServerConfig = CONFIG) -> Iterator[Running]:
    """A server whose model answers with exactly this text, drafted k tokens at a time and all accepted."""
    script = [*ids_of(prompt), *ids_of(text), *[END] * 40]
    loaded = scripted(script, VOCAB, tokenizer=byte_tokenizer(), eos_token_ids=(END,))
    spec = {"num_speculative_tokens": k, "min_budget": 8, "adaptive": False} if k else {"method": "none"}
    drafts = lambda _, position: script[min(position, len(script) - 1)]  # noqa: E731
    with serving(loaded, config, speculative_config=spec) as server, override_drafts(server.engine(), drafts):
        yield server


def both(server: Running, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the answer, the message that the streamed deltas make), which must be equal but for the ids of calls."""
    request = {"messages": MESSAGES, "temperature": 0, "max_tokens": 200, **body}
    whole = server.post("/v1/chat/completions", request).json()
    *chunks, last, done = events(server.post("/v1/chat/completions", {
        **request, "stream": True, "stream_options": {"include_usage": True}}))
    assert done == "[DONE]"
    for usage in (last["usage"], whole["usage"]):
        del usage["prompt_tokens_details"]  # the second request finds the first one's prompt in the cache
    assert last["usage"] == whole["usage"]
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "calls": {}}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            mine = message["calls"].setdefault(call["index"], {"name": call["function"].get("name"), "arguments": ""})
            mine["arguments"] += call["function"]["arguments"]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert reasons == [whole["choices"][0]["finish_reason"]]
    answer = whole["choices"][0]["message"]
    assert message["content"] == (answer["content"] or "")
    assert message["reasoning"] == message["reasoning_content"] == (answer["reasoning"] or "")
    assert [c["function"] for c in answer.get("tool_calls", [])] == [message["calls"][i] for i in sorted(message["calls"])]
    return whole, message


@pytest.mark.parametrize("text", ["<think>ab</think>cd", "no <think>tags</think> here", "<think>cut sh", "<think>é</think>你<thin",
                                  "plain"])
def test_t38_both_fields_for_every_block(text: str) -> None:
    """Markers inside accepted blocks, tags as plain text, no closing tag."""
    expected = make_reasoning_parser("qwen3").feed(text, finished=True)
    for k in (0, 1, 3, 8):
        with saying(text, k) as server:
            whole, message = both(server)
            assert (message["reasoning"], message["content"]) == expected
            tokens = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert tokens == len(ids_of(expected[0]))
            hidden = both_without_reasoning(server)
            assert "reasoning" not in hidden
            assert hidden["content"] == expected[1]


def both_without_reasoning(server: Running) -> dict[str, Any]:
    message: dict[str, Any] = server.post("/v1/chat/completions", {
        "messages": MESSAGES, "temperature": 0, "include_reasoning": False}).json()["choices"][0]["message"]
    return message


def test_a_prompt_that_opens_the_reasoning() -> None:
    with saying("ab</think>cd", 3, "<|user|>P\n<|assistant|><think>") as server:
        _, message = both(server, chat_template_kwargs={"think": True})
        assert (message["reasoning"], message["content"]) == ("ab", "cd")


def test_no_parser_no_reasoning() -> None:
    with saying("<think>ab</think>cd", 3, config=ServerConfig()) as server:
        message = server.post("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0}).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "<think>ab</think>cd", "refusal": None}


@pytest.mark.parametrize("k", [0, 5])
def test_tool_calls(k: int) -> None:
    calls = ('<tool_call>\n{"name": "add", "arguments": {"a": true}}\n</tool_call>'
             '<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    tools = json.dumps([ADD])
    with saying(f"<think>hm</think>I add. {calls}", k, f"<|tools|>{tools}\n<|user|>P\n<|assistant|>") as server:
        whole, message = both(server, tools=[ADD], tool_choice="auto", max_tokens=220)
        choice = whole["choices"][0]
        assert (choice["finish_reason"], message["reasoning"], message["content"]) == ("tool_calls", "hm", "I add. ")
        assert message["calls"] == {0: {"name": "add", "arguments": '{"a": true}'}, 1: {"name": "add", "arguments": "{}"}}
        r = server.client().chat.completions.create(model=server.service.names[0], messages=MESSAGES, temperature=0, max_tokens=220,
                                                    tools=[ADD])  # type: ignore[arg-type, list-item]
        assert [c.function.name for c in r.choices[0].message.tool_calls or []] == ["add", "add"]  # type: ignore[union-attr]
        assert len({c.id for c in r.choices[0].message.tool_calls or []}) == 2


# A random model may write white space for ever, where JSON allows it.
NO_SPACE = {str(i): -100 for i in ids_of(" \n\t\r")}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A random model: whatever form its answers have comes from what was asked for."""
    with serving(replace(tiny_loaded(), eos_token_ids=(END,)), CONFIG) as running:
        yield running


@pytest.mark.parametrize("form", [
    {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, {"guided_regex": "[a-c]{3}-[0-9]{2}"},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}, {"guided_choice": ["yes", "no", "perhaps"]},
    {"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}, {"guided_grammar": 'root ::= "a" | "b" root'},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ADD["function"]["parameters"]}}},  # type: ignore[index]
    {"guided_json": ADD["function"]["parameters"]}], ids=str)  # type: ignore[index]
@pytest.mark.parametrize("seed", [None, 5])
def test_answers_hold_to_their_form(server: Running, form: dict[str, Any], seed: int | None) -> None:
    """After the thinking, whose length is bounded by the budget."""
    body = {**form, "max_tokens": 300, "thinking_token_budget": 5, "chat_template_kwargs": {"think": True}, "seed": seed,
            "logit_bias": NO_SPACE, "temperature": 0 if seed is None else 1.0}
    whole, message = both(server, **body)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 5
    text = message["content"]
    kind = next(iter(form))
    if "json" in kind or kind == "response_format":
        assert isinstance(json.loads(text)["a"], bool)
    else:
        pattern = {"regex": "[a-c]{3}-[0-9]{2}", "choice": "yes|no|perhaps", "grammar": "b*a"}
        name = kind.removeprefix("guided_") if kind.startswith("guided") else next(iter(form[kind]))
        assert re.fullmatch(pattern[name], text)


def test_forced_calls(server: Running) -> None:
    common = {"tools": [ADD], "chat_template_kwargs": {"think": True}, "thinking_token_budget": 3, "seed": 2,
              "logit_bias": NO_SPACE}
    whole, message = both(server, **common, tool_choice={"type": "function", "function": {"name": "add"}})
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert isinstance(json.loads(message["calls"][0]["arguments"])["a"], bool)
    body = {"messages": MESSAGES, **common, "tool_choice": "required", "max_tokens": 300}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    if choice["finish_reason"] == "tool_calls":
        assert {c["function"]["name"] for c in choice["message"]["tool_calls"]} == {"add"}
    else:  # a random model may go on listing calls: then the limit cuts it
        assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("wrong", [
    {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"kind": 1}}, {"structured_outputs": {}},
    {"guided_grammar": "nonsense"}, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "type": "no such"}}}}], ids=str)
def test_forms_that_are_none(server: Running, wrong: dict[str, Any]) -> None:
    for stream in (False, True):
        r = server.post("/v1/chat/completions", {"messages": MESSAGES, **wrong, "stream": stream})
        assert r.status_code == 400
        assert "structured_outputs" in r.json()["error"]["param"]


def test_a_budget_needs_a_parser() -> None:
    with serving() as plain:
        r = plain.post("/v1/chat/completions", {"messages": MESSAGES, "thinking_token_budget": 5})
        assert (r.status_code, r.json()["error"]["param"]) == (400, "thinking_token_budget")
