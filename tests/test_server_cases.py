"""Faults that users of such servers report, over HTTP: cases.md's T13, T16, T18, T35, T37, T41 and T45."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from serving import VOCAB, Running, byte_tokenizer, events, offline, serving
from sparsespec import SamplingParams
from sparsespec.testing import override_drafts, scripted

K = 4
LENGTH = 512


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


def ids_of(text: str) -> list[int]:
    return list(byte_tokenizer()(text, add_special_tokens=False)["input_ids"])


@contextmanager
def saying(text: str, k: int = K, eos: int | None = None) -> Iterator[Running]:
    """A server whose model answers the prompt "P" with exactly this text, drafted k tokens at a time and all accepted."""
    ids = ids_of("P") + ids_of(text) + ([eos] if eos is not None else [])
    script = [*ids, *[ids_of(".")[0]] * 64]
    loaded = scripted(script, VOCAB, tokenizer=byte_tokenizer(), eos_token_ids=() if eos is None else (eos,))
    spec = {"num_speculative_tokens": k, "min_budget": 8, "adaptive": False} if k else {"method": "none"}
    drafts = lambda _, position: script[min(position, len(script) - 1)]  # noqa: E731
    with serving(loaded, speculative_config=spec) as running, override_drafts(running.engine(), drafts):
        yield running


def both_ways(server: Running, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(choice of the answer, choices of the streamed chunks) of one request."""
    request = {"prompt": "P", "temperature": 0, "return_token_ids": True, **body}
    whole = server.post("/v1/completions", request).json()["choices"][0]
    *chunks, done = events(server.post("/v1/completions", {**request, "stream": True}))
    assert done == "[DONE]"
    choices = [c for chunk in chunks for c in chunk["choices"]]
    assert "".join(c["text"] for c in choices) == whole["text"]
    assert [t for c in choices for t in c["token_ids"]] == whole["token_ids"]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [whole["finish_reason"]]
    return whole, choices


@pytest.mark.parametrize(("stop", "kept", "match"), [
    (["STOP"], "one two ", "STOP"), (["two STOP", "TOP"], "one ", "two STOP"), (["P three", " three"], "one two STO", "P three"),
    (["xyz"], None, None)])
def test_t13_stop_strings(stop: list[str], kept: str | None, match: str | None) -> None:
    """Cut at the earliest match, inside a block and across blocks; nothing of it is streamed, no other text is lost."""
    text = "one two STOP three"
    for k in (0, 1, 5, 16):
        with saying(text, k) as server:
            whole, chunks = both_ways(server, stop=stop, max_tokens=len(text), logprobs=2)
            assert (whole["text"], whole["stop_reason"]) == (text if kept is None else kept, match)
            assert whole["finish_reason"] == ("length" if match is None else "stop")
            end = len(text) if match is None else text.index(match) + len(match)
            assert len(whole["token_ids"]) == len(whole["logprobs"]["tokens"]) == end  # a token is a byte: none starts after
            assert sum(len(c["logprobs"]["tokens"]) for c in chunks) == end


def test_t16_exactly_max_tokens(server: Running) -> None:
    for count in range(1, 2 * K + 4):
        whole, _ = both_ways(server, max_tokens=count, ignore_eos=True)
        assert (len(whole["token_ids"]), whole["finish_reason"]) == (count, "length")
        body = {"prompt": "P", "max_tokens": count, "ignore_eos": True}
        assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == count


def test_t18_too_long_prompts(server: Running) -> None:
    """They are refused with an error that says so; what runs and what comes next do not notice."""
    body = {"prompt": "run", "max_tokens": 250, "temperature": 0}
    running: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: running.append(server.post("/v1/completions", body).json()))
    thread.start()
    server.wait(lambda s: s["running"] == 1)
    for length in (LENGTH - 1, LENGTH, LENGTH + 1, 10 * LENGTH):
        for prompt in ([1] * length, "a" * length):
            r = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 5})
            if length == LENGTH - 1:
                assert r.json()["usage"]["completion_tokens"] == 1
            else:
                assert r.status_code == 400
                error = r.json()["error"]
                assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
                assert "max_model_len" in error["message"]
    thread.join(30)
    params = SamplingParams(max_tokens=250, temperature=0)
    assert running[0]["choices"][0]["text"] == offline().generate("run", params, use_tqdm=False)[0].outputs[0].text
    assert server.post("/v1/completions", {"prompt": "next", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("k", [0, 5])
def test_t35_counts_end_with_the_text(k: int) -> None:
    """An EOS among accepted drafts: what follows it counts neither as emitted nor as accepted. Zeros without speculation."""
    with saying("abcdefgh", k, eos=0) as server:
        r = server.post("/v1/completions", {"prompt": "P", "temperature": 0, "max_tokens": 50, "return_speculation": True,
                                            "return_token_ids": True}).json()
        choice, drafts, stats = r["choices"][0], r["speculation"], server.wait_idle()
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abcdefgh", "stop", None)
        assert len(choice["token_ids"]) == r["usage"]["completion_tokens"] == stats["num_emitted_tokens"] == 9
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            assert drafts[name] == stats[name]
        assert stats["num_accepted_tokens"] == sum(stats["accepted_per_position"]) <= 9
        if k == 0:
            assert drafts == {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0, "acceptance_rate": 0.0,
                              "mean_accepted": 0.0}
        else:
            assert drafts["num_drafts"] > 0
        assert "NaN" not in server.get("/metrics").text


@pytest.mark.parametrize("k", range(8))
def test_t37_no_character_twice_and_none_lost(k: int) -> None:
    text = "a 👩‍👩‍👧‍👦 b 👍🏽 안녕하세요 GPU上的sparse注意力 e\u0301a\u0308 नमस्ते ท่าน"
    with saying(text, k) as server:
        whole, chunks = both_ways(server, max_tokens=len(ids_of(text)))
        assert whole["text"] == text
        assert not any("\ufffd" in c["text"] for c in chunks)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_t41_nothing_runs_for_clients_that_left(path: str, stream: bool) -> None:
    with serving(max_model_len=4096, kv_cache_tokens=32768) as server:
        host, port = server.url.removeprefix("http://").split(":")
        prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        request = httpx.Request("POST", server.url + path, json={**prompt, "max_tokens": 4000, "ignore_eos": True, "n": 4,
                                                                "stream": stream})
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in request.headers.items()) + "\r\n"
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head.encode() + request.read())
            time.sleep(0.3)
            assert server.wait(lambda s: s["running"] == 4)["device_pages_free"] < 2048
        server.wait_idle(2)
        assert server.service.engine.num_pending == 0
        assert not server.service.active


def test_t45_an_abort_gives_what_there_is(server: Running) -> None:
    prompt = "abort me"
    reference = offline().generate(prompt, SamplingParams(temperature=0, max_tokens=160), use_tqdm=False)[0].outputs[0]

    async def aborted(stream: bool, name: str) -> tuple[list[int], list[Any], str, str]:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 160, "logprobs": 1, "request_id": name, "return_token_ids": True,
                "stream": stream}
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            answer = asyncio.ensure_future(client.post("/v1/completions", json=body))
            while not server.service.active.get(f"cmpl-{name}") or server.service.engine.stats()["num_emitted_tokens"] < at + 20:
                await asyncio.sleep(0.001)
            r = await client.post("/abort_request", json={"request_id": name})
            assert r.json() == {"aborted": [f"cmpl-{name}"]}
            response = await answer
        chunks = events(response)[:-1] if stream else [response.json()]
        choices = [c for chunk in chunks for c in chunk["choices"]]
        ids = [t for c in choices for t in c["token_ids"]]
        logprobs = [lp for c in choices for lp in c["logprobs"]["token_logprobs"]]
        return ids, logprobs, "".join(c["text"] for c in choices), choices[-1]["finish_reason"]

    for stream in (True, False):
        at = server.wait_idle()["num_emitted_tokens"]
        ids, logprobs, text, reason = asyncio.run(aborted(stream, f"t45-{stream}"))
        assert reason == "abort"
        assert 20 <= len(ids) < 160
        assert len(logprobs) == len(ids)
        assert ids == reference.token_ids[:len(ids)]
        assert text == byte_tokenizer().decode(ids, skip_special_tokens=True)
        server.wait_idle()
        rest = server.post("/v1/completions", {"prompt": ids_of(prompt) + ids, "temperature": 0, "max_tokens": 160 - len(ids),
                                               "return_token_ids": True}).json()["choices"][0]
        assert ids + rest["token_ids"] == reference.token_ids
