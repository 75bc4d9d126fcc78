"""/v1/chat/completions through the official client: every field, streamed and not, and both alike."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from serving import SPECIAL, Running, byte_tokenizer, events, offline, serving
from sparsespec import SamplingParams
from sparsespec.server.parsing import ChoiceParser, NamedCall, RequiredCalls

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
PROMPT = "<|system|>Be brief.\n<|user|>Why is the sky blue?\n<|assistant|>"
EXTRAS: list[dict[str, Any]] = [
    {"seed": 7}, {"temperature": 0}, {"seed": 3, "temperature": 1.3, "top_p": 0.8}, {"seed": 5, "n": 3},
    {"seed": 1, "logprobs": True, "top_logprobs": 5}, {"seed": 2, "stop": ["t", "e"]}, {"seed": 4, "presence_penalty": 0.5,
     "frequency_penalty": 0.5, "logit_bias": {"65": 5}},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


def joined(chunks: list[Any], index: int = 0) -> str:
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index)


def test_every_field_of_an_answer(server: Running) -> None:
    client = server.client()
    model = client.models.list().data[0].id
    r = client.chat.completions.create(model=model, messages=MESSAGES, seed=7, max_tokens=24)
    assert (r.object, r.model, r.id[:9]) == ("chat.completion", model, "chatcmpl-")
    assert r.created > 1_700_000_000
    assert r._request_id == r.id
    expected = offline().generate(PROMPT, SamplingParams(seed=7, max_tokens=24), use_tqdm=False)[0]
    answer, choice = expected.outputs[0], r.choices[0]
    assert (len(r.choices), choice.index, choice.finish_reason, choice.logprobs) == (1, 0, answer.finish_reason, None)
    assert (choice.message.role, choice.message.refusal, choice.message.tool_calls) == ("assistant", None, None)
    assert choice.message.content == answer.text
    assert r.usage is not None
    assert (r.usage.prompt_tokens, r.usage.completion_tokens) == (len(expected.prompt_token_ids), len(answer.token_ids))
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens
    assert r.usage.prompt_tokens_details is not None
    assert r.usage.prompt_tokens_details.cached_tokens == 0
    assert r.usage.completion_tokens_details is not None
    assert r.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_deltas_joined_are_the_answer(server: Running, extra: dict[str, Any]) -> None:
    """T20 among them: the log probabilities of stream and answer are equal element by element."""
    client = server.client()
    request: dict[str, Any] = {"model": server.service.names[0], "messages": MESSAGES, "max_tokens": 40, **extra}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert {c.id for c in chunks} == {chunks[0].id}
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    for usage in (chunks[-1].usage, whole.usage):
        usage.prompt_tokens_details = None  # the second request finds the first one's prompt in the cache
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert all(c.delta.role is None for c in mine[1:])
        assert joined(chunks, choice.index) == choice.message.content
        reasons = [c.finish_reason for c in mine if c.finish_reason is not None]
        assert reasons == [choice.finish_reason] == [mine[-1].finish_reason]
        if choice.logprobs is None:
            assert all(c.logprobs is None for c in mine)
        else:
            streamed = [t for c in mine if c.logprobs is not None for t in c.logprobs.content or []]
            assert streamed == choice.logprobs.content
            assert len(streamed) == whole.usage.completion_tokens
            assert all(len(t.top_logprobs) == extra["top_logprobs"] for t in streamed)
            text = b"".join(bytes(t.bytes or []) for t in streamed if t.token not in SPECIAL)
            assert text.decode(errors="replace") == choice.message.content


def test_choices_of_one_request_differ_and_are_reproducible(server: Running) -> None:
    request: dict[str, Any] = {"model": server.service.names[0], "messages": MESSAGES, "max_tokens": 24, "n": 4, "seed": 11}
    first, second = (server.client().chat.completions.create(**request) for _ in range(2))
    texts = [c.message.content for c in first.choices]
    assert len(set(texts)) == 4
    assert texts == [c.message.content for c in second.choices]
    assert [c.index for c in first.choices] == [0, 1, 2, 3]


def test_async_client(server: Running) -> None:
    async def both() -> tuple[Any, list[Any]]:
        async with server.async_client() as client:
            request: dict[str, Any] = {"model": server.service.names[0], "messages": MESSAGES, "max_tokens": 24, "seed": 3}
            whole, stream = await asyncio.gather(client.chat.completions.create(**request),
                                                 client.chat.completions.create(**request, stream=True))
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(both())
    assert joined(chunks) == whole.choices[0].message.content


def test_the_stream_on_the_wire(server: Running) -> None:
    r = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, "seed": 1, "stream": True})
    assert r.headers["content-type"].startswith("text/event-stream")
    found = events(r)
    assert found[-1] == "[DONE]"
    assert found.count("[DONE]") == 1
    assert r.text.endswith("data: [DONE]\n\n")
    assert sum(c["finish_reason"] is not None for e in found[:-1] for c in e["choices"]) == 1


def test_usage_in_every_chunk(server: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8, "seed": 1, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last, done = events(server.post("/v1/chat/completions", body))
    assert done == "[DONE]"
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 8


def test_what_goes_beyond_openai(server: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1,
            "ignore_eos": True, "min_tokens": 3, "stop_token_ids": [38], "return_token_ids": True, "return_speculation": True,
            "request_id": "mine-1", "prompt_logprobs": 1, "user": "somebody", "skip_special_tokens": False}
    r = server.post("/v1/chat/completions", body).json()
    ids = byte_tokenizer()(PROMPT, add_special_tokens=False)["input_ids"]
    assert (r["id"], r["prompt_token_ids"]) == ("chatcmpl-mine-1", ids)
    expected = offline().generate({"prompt_token_ids": ids}, SamplingParams(
        max_tokens=20, temperature=0, top_k=5, min_p=0.01, repetition_penalty=1.1, ignore_eos=True, min_tokens=3,
        stop_token_ids=[38], prompt_logprobs=1, skip_special_tokens=False), use_tqdm=False)[0]
    choice = r["choices"][0]
    assert (choice["token_ids"], choice["message"]["content"]) == (expected.outputs[0].token_ids, expected.outputs[0].text)
    assert (choice["finish_reason"], choice["stop_reason"]) == (expected.outputs[0].finish_reason, expected.outputs[0].stop_reason)
    assert len(r["prompt_logprobs"]) == len(ids)
    assert r["prompt_logprobs"][0] is None
    assert r["prompt_logprobs"][1][str(ids[1])]["rank"] >= 1
    drafts = r["speculation"]
    assert drafts["num_draft_tokens"] >= drafts["num_accepted_tokens"] > 0
    assert drafts["acceptance_rate"] == drafts["num_accepted_tokens"] / drafts["num_draft_tokens"]


def test_streamed_extras_equal_those_of_the_answer(server: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 20, "seed": 9, "return_token_ids": True, "return_speculation": True}
    whole = server.post("/v1/chat/completions", body).json()
    *chunks, _ = events(server.post("/v1/chat/completions", {**body, "stream": True}))
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    ids = [t for c in chunks for choice in c["choices"] for t in choice.get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
    assert [c["speculation"] for c in chunks if "speculation" in c] == [chunks[-1]["speculation"]]
    assert chunks[-1]["speculation"]["num_draft_tokens"] > 0


def test_template_arguments(server: Running) -> None:
    def ids(**extra: Any) -> str:
        found: str = byte_tokenizer().decode(server.post("/tokenize", {"messages": MESSAGES, **extra}).json()["tokens"])
        return found

    assert ids() == PROMPT
    assert ids(chat_template_kwargs={"think": True}) == PROMPT + "<think>"
    assert ids(add_generation_prompt=False) == PROMPT.removesuffix("<|assistant|>")
    parts = [{"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}, MESSAGES[1]]
    assert ids(messages=parts) == PROMPT
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    assert '"name": "add"' in ids(tools=[tool])
    end = [*MESSAGES, {"role": "assistant", "content": "Because"}]
    assert ids(messages=end, continue_final_message=True) == PROMPT + "Because"


def test_forced_calls_are_the_same_for_any_split() -> None:
    text = '{"a": "é", "b": [1, 2]}'
    for size in range(1, len(text) + 1):
        parser = NamedCall("add")
        deltas = [d for i in range(0, len(text), size) for d in parser.feed(text[i:i + size])[1]] + list(parser.feed("", True)[1])
        assert "".join(d.arguments for d in deltas) == text
        assert [d.name for d in deltas] == ["add"] + [None] * (len(deltas) - 1)
    calls = '[{"name": "add", "parameters": {"a": 1}}, {"name": "sub", "parameters": {}}]'
    for cut in range(len(calls)):
        required = RequiredCalls()
        assert required.feed(calls[:cut]) == ("", [])
        content, found = required.feed(calls[cut:], finished=True)
        assert (content, [(c.index, c.name, c.arguments) for c in found]) == ("", [(0, "add", '{"a": 1}'), (1, "sub", "{}")])
    assert RequiredCalls().feed('[{"name": "add"', finished=True) == ('[{"name": "add"', [])
    for one_call, count in ((False, 2), (True, 1)):
        piece = ChoiceParser(None, RequiredCalls(), one_call).feed(calls, finished=True)
        assert [c.name for c in piece.calls] == ["add", "sub"][:count]
