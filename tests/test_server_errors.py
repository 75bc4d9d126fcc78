"""What a server says when it says no: OpenAI's shape, the right status, and what to do about it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from serving import Running, serving
from sparsespec.config import ServerConfig
from sparsespec.core.errors import InvalidValueError
from sparsespec.engine.engine import Engine
from sparsespec.server.app import KEY_VARIABLE, create_app
from sparsespec.server.render import Renderer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(config=ServerConfig(max_prompts=4)) as running:
        yield running


def error(response: httpx.Response) -> dict[str, Any]:
    """The error, after a look at its shape."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/v1/chat/completions", {"temperature": -1}, "temperature"),
    ("/v1/chat/completions", {"temperature": "hot"}, "temperature"),
    ("/v1/chat/completions", {"temperature": 10**400}, "temperature"),
    ("/v1/chat/completions", {"temperature": 1e300}, "temperature"),
    ("/v1/chat/completions", {"repetition_penalty": 1e300}, "repetition_penalty"),
    ("/v1/chat/completions", {"top_p": 0}, "top_p"),
    ("/v1/chat/completions", {"n": 0}, "n"),
    ("/v1/chat/completions", {"n": 16000}, "n"),
    ("/v1/chat/completions", {"seed": 2**64}, "seed"),
    ("/v1/chat/completions", {"min_tokens": 10**12, "max_tokens": None}, "min_tokens"),
    ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
    ("/v1/chat/completions", {"max_completion_tokens": 3}, "max_tokens"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "content"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": "{"}}]}]}, "tool_calls"),
    ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs"),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("/v1/chat/completions", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ("/v1/chat/completions", {"chat_template": "{{ messages }}"}, "chat_template"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {"tool_choice": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
    ("/v1/chat/completions", {"logit_bias": {"a": 1}}, "logit_bias"),
    ("/v1/chat/completions", {"logit_bias": {"9999": 1}}, "logit_bias"),
    ("/v1/chat/completions", {"stop": ["a"] * 65}, "stop"),
    ("/v1/chat/completions", {"stop": "a" * 5000}, "stop"),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}, "response_format"),
    ("/v1/chat/completions", {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ("/v1/chat/completions", {"request_id": "a b"}, "request_id"),
    ("/v1/chat/completions", {"timeout": 0}, "timeout"),
    ("/v1/chat/completions", {"temperatur": 1}, "temperatur"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, "prompt"),
    ("/v1/completions", {"prompt": ["a"] * 5}, "prompt"),
    ("/v1/completions", {"prompt": [10**30]}, "prompt_token_ids"),
    ("/v1/completions", {"prompt": [-1]}, "prompt_token_ids"),
    ("/v1/completions", {"best_of": 3}, "best_of"),
    ("/v1/completions", {"suffix": "end"}, "suffix"),
    ("/v1/completions", {"stop_token_ids": [10**30]}, "stop_token_ids"),
    ("/v1/completions", {"bad_words": [""]}, "bad_words"),
    ("/v1/completions", {"stream": True, "echo": True, "logprobs": 1}, "prompt_logprobs"),
    ("/tokenize", {"prompt": None}, "prompt"),
    ("/abort_request", {}, "request_id"),
], ids=str)
def test_400_names_field_value_and_remedy(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    base = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}.get(path, {})
    r = httpx.post(server.url + path, content=json.dumps({**base, **body}), headers={"content-type": "application/json"})
    assert r.status_code == 400
    found = error(r)
    assert (found["type"], found["param"]) == ("invalid_request_error", param)
    assert found["message"].startswith(param)
    assert found["message"].count(". ") >= 1  # the remedy


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"nul", b'"x"', b"\xff\xfe", b'{"prompt": "x", "temperature": NaN}',
                                     b"[" * 100_000, b'{"a":' * 5000, b'{"prompt": "\\ud800"}', b"1" * 5000])
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_malformed_bodies(server: Running, content: bytes, kind: str) -> None:
    r = httpx.post(f"{server.url}/v1/completions", content=content, headers={"content-type": kind}, timeout=30)
    assert r.status_code in (400, 415)
    assert error(r)["type"] == "invalid_request_error"


def test_errors_come_before_a_stream(server: Running) -> None:
    r = server.post("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x" * 600}], "stream": True})
    assert (r.status_code, error(r)["code"]) == (400, "context_length_exceeded")


def test_unknown_things(server: Running) -> None:
    r = server.post("/v1/chat/completions", {**CHAT, "model": "other"})
    assert (r.status_code, error(r)["code"], error(r)["param"]) == (404, "model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        server.client().completions.create(model="other", prompt="x")
    assert (server.get("/v1/nothing").status_code, error(server.get("/v1/nothing"))["code"]) == (404, "not_found")
    assert (server.get("/v1/completions").status_code, error(server.get("/v1/completions"))["code"]) == (405, "method_not_allowed")


def test_ids_are_used_once(server: Running) -> None:
    body = {"prompt": "x", "max_tokens": 300, "request_id": "same", "ignore_eos": True}
    first: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: first.append(server.post("/v1/completions", body)))
    thread.start()
    server.wait(lambda s: s["running"] == 1)
    r = server.post("/v1/completions", body)
    assert (r.status_code, error(r)["param"]) == (400, "request_id")
    thread.join(30)
    assert first[0].json()["usage"]["completion_tokens"] == 300  # the first one did not suffer
    assert server.get("/v1/models", headers={"x-request-id": "free"}).status_code == 200
    assert server.post("/v1/completions", TEXT, headers={"x-request-id": "mine.7"}).json()["id"] == "cmpl-mine.7"


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "from-environment")
    with serving(config=ServerConfig(api_key=["secret", "schlüssel"])) as server:
        for key in ("", "wrong", "secre", "secret2", "none"):
            r = server.post("/v1/completions", TEXT, headers={"Authorization": f"Bearer {key}"} if key else {})
            assert (r.status_code, error(r)["code"], r.headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
        assert server.post("/v1/completions", TEXT, headers={"Authorization": "Basic secret"}).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key="wrong").models.list()
        for key in (b"Bearer secret", "Bearer schlüssel".encode(), b"bearer from-environment"):
            assert httpx.post(f"{server.url}/v1/completions", json=TEXT, headers={b"Authorization": key}).status_code == 200
        assert [m.id for m in server.client(api_key="secret").models.list()] == server.service.names
        for path in ("/health", "/version", "/metrics", "/stats", "/openapi.json"):
            assert server.get(path).status_code == 200
        for path in ("/tokenize", "/detokenize", "/abort_request"):
            assert server.post(path, {}).status_code == 401


def test_body_size() -> None:
    with serving(config=ServerConfig(max_body_mib=0.01)) as server:
        r = server.post("/tokenize", {"prompt": "a" * 20_000})
        assert (r.status_code, error(r)["code"]) == (413, "body_too_large")

        def pieces() -> Iterator[bytes]:  # no Content-Length
            yield b'{"prompt": "'
            for _ in range(20):
                yield b"a" * 1000
            yield b'"}'

        r = httpx.post(f"{server.url}/tokenize", content=pieces(), headers={"content-type": "application/json"})
        assert (r.status_code, error(r)["code"]) == (413, "body_too_large")
        assert server.post("/tokenize", {"prompt": "a" * 5000}).status_code == 200


def test_a_full_queue() -> None:
    """429 with Retry-After; those that were let in all finish."""
    with serving(config=ServerConfig(max_waiting_requests=3), max_num_seqs=2) as server:
        async def crowd() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                return await asyncio.gather(*(client.post("/v1/completions", json={**TEXT, "max_tokens": 60}) for _ in range(20)))

        answers = asyncio.run(crowd())
        refused = [r for r in answers if r.status_code != 200]
        assert len(answers) - len(refused) >= 5
        assert refused
        for r in refused:
            assert (r.status_code, error(r)["type"], error(r)["code"]) == (429, "rate_limit_error", "queue_full")
            assert 1 <= int(r.headers["retry-after"]) <= 60
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "n": 5}).status_code == 200
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "n": 6}).status_code == 400
        server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_time_limits(stream: bool) -> None:
    """A request's time is over: it ends with what it has, or with 504 if that is nothing."""
    with serving(config=ServerConfig(request_timeout=0.4), max_num_seqs=1, max_model_len=4000, kv_cache_tokens=8192) as server:
        body = {"prompt": "x", "max_tokens": 3900, "stream": stream, "request_id": "long"}
        first: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: first.append(server.post("/v1/completions", body)))
        start = time.monotonic()
        thread.start()
        server.wait(lambda s: s["running"] == 1)
        r = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "timeout": 0.05, "stream": stream})
        assert (r.status_code, error(r)["type"], error(r)["param"]) == (504, "timeout_error", "timeout")
        thread.join(20)
        assert time.monotonic() - start < 5
        assert '"finish_reason":"abort","stop_reason":"timeout"' in first[0].text
        server.wait_idle()


def test_settings_that_do_not_go_together(server: Running) -> None:
    engine = server.engine()
    with pytest.raises(InvalidValueError, match="tool_call_parser"):
        ServerConfig(enable_auto_tool_choice=True)
    with pytest.raises(InvalidValueError, match="chat_template"):
        create_app(engine, ServerConfig(chat_template="/no/such/file.jinja"))
    for wrong in ({"port": 70000}, {"reasoning_parser": "none"}, {"drain_timeout": -1}, {"uvicorn_log_level": "loud"}):
        with pytest.raises(InvalidValueError, match=next(iter(wrong))):
            ServerConfig(**wrong)


def test_templates_run_in_a_sandbox() -> None:
    """Neither Python's insides nor endless output can be had through one."""
    from serving import byte_tokenizer
    from sparsespec.server.protocol.chat import Message

    def render(template: str) -> Any:
        renderer = Renderer(byte_tokenizer(), 64, template)
        return asyncio.run(renderer.chat([Message(role="user", content="x")]))

    assert render("{{ messages[0].content }}")["prompt"] == "x"
    for template in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}", "{% if %}",
                     "{% for i in range(10 ** 9) %}x{% endfor %}", "{{ 'x' * 10 ** 7 }}"):
        with pytest.raises(InvalidValueError, match=r"^(messages|prompt)="):
            render(template)


def test_an_unexpected_error_tells_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(engine: Engine) -> None:
        raise RuntimeError("inner secret")

    monkeypatch.setattr(server.service.renderer, "text", broken)
    r = server.post("/v1/completions", TEXT)
    assert (r.status_code, error(r)["type"]) == (500, "server_error")
    assert "secret" not in r.text
    monkeypatch.undo()
    assert server.post("/v1/completions", TEXT).status_code == 200
