"""What clients see when the engine or the server ends: crashes, a killed thread, SIGTERM. docs/serving.md says the same."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serving import Running, engine_config, events, free_port, offline, serving, tiny_directory, tiny_loaded
from sparsespec import SamplingParams
from sparsespec.cli.flags import engine_kwargs
from sparsespec.cli.main import build_parser, main
from sparsespec.cli.serve import server_config
from sparsespec.engine.engine import Engine

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 480, "temperature": 0, "ignore_eos": True}


def crash(server: Running) -> None:
    """The next step fails, in the engine's thread."""
    def broken() -> Any:
        raise RuntimeError("out of memory or whatever")

    server.engine().__dict__["step"] = broken


def kill(server: Running) -> None:
    """The engine's thread is told to exit, in the middle of whatever it does."""
    thread = next(t for t in threading.enumerate() if t.name == "sparsespec-engine" and t.is_alive())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))


@contextmanager
def clients(server: Running) -> Iterator[list[httpx.Response]]:
    """Two clients, one of them streamed to, that have been served some tokens; answers are there at the end."""
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda s=stream: answers.append(server.post("/v1/completions", {**LONG, "stream": s})))
               for stream in (False, True)]
    before = server.stats()["num_emitted_tokens"]
    for thread in threads:
        thread.start()
    server.wait(lambda s: s["running"] == 2 and s["num_emitted_tokens"] >= before + 8)
    yield answers
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a client was left hanging"


@pytest.mark.parametrize("strike", [crash, kill])
def test_a_crash_is_answered_and_survived_once(strike: Callable[[Running], None]) -> None:
    reference = offline().generate("x", SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0].outputs[0].text
    request = {**LONG, "max_tokens": 30}
    with serving() as server:
        with clients(server) as answers:
            strike(server)
        whole, streamed = sorted(answers, key=lambda r: r.status_code, reverse=True)
        assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")
        assert streamed.status_code == 200
        *chunks, problem, done = events(streamed)
        assert done == "[DONE]"
        assert chunks
        assert (problem["error"]["type"], problem["error"]["param"]) == ("server_error", "engine")
        assert all(c["finish_reason"] is None for chunk in chunks for c in chunk["choices"])
        assert server.get("/health").status_code == 200
        assert server.wait(lambda s: s["engine_restarts"] == 1)["running"] == 0
        assert server.post("/v1/completions", request).json()["choices"][0]["text"] == reference
        assert 'engine_restarts_total{engine="0"' in server.get("/metrics").text
        server.wait_idle()
        with clients(server) as answers:  # the second failure is the last
            strike(server)
        assert sorted(r.status_code for r in answers) == [200, 500]
        for _ in range(2):
            r = server.get("/health")
            assert (r.status_code, r.json()["status"]) == (503, "dead")
            refused = server.post("/v1/completions", request)
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable_error")
        assert server.get("/metrics").status_code == 200
        with pytest.raises(openai.InternalServerError):
            server.client().completions.create(model=server.service.names[0], prompt="x")


def test_a_client_of_the_stream_meets_an_exception() -> None:
    with serving() as server:
        stream = server.client().completions.create(model=server.service.names[0], prompt="x", max_tokens=480, stream=True)
        next(stream)
        crash(server)
        with pytest.raises(openai.APIError, match="is set up anew"):
            list(stream)


def test_an_engine_that_cannot_be_set_up_again() -> None:
    def refuse() -> Engine:
        raise MemoryError("no host memory")

    with serving(make_engine=refuse) as server:
        with clients(server) as answers:
            crash(server)
        assert sorted(r.status_code for r in answers) == [200, 500]
        end = time.monotonic() + 5  # clients were told before the attempt was made
        while server.get("/health").status_code != 503:
            assert time.monotonic() < end
        assert server.post("/v1/completions", LONG).status_code == 503


def test_what_waited_for_a_crashed_engine_is_served_by_its_successor() -> None:
    """Requests that the engine had not been given yet are not lost."""
    gate = threading.Event()

    def slowly() -> Engine:
        gate.wait(20)
        return Engine(engine_config(), tiny_loaded())

    with serving(make_engine=slowly) as server:
        with clients(server):
            crash(server)
            time.sleep(0.1)
            late: list[httpx.Response] = []
            thread = threading.Thread(target=lambda: late.append(server.post("/v1/completions", {**LONG, "max_tokens": 3})))
            thread.start()
            time.sleep(0.2)
            gate.set()
        thread.join(20)
        assert late[0].json()["usage"]["completion_tokens"] == 3


def test_memory_that_is_refused_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that fails for want of memory is that request's 500; the others do not notice."""
    with serving() as server:
        engine = server.engine()
        admit = engine.add_request

        def refuse(request_id: str, *args: Any, **kwargs: Any) -> None:
            if request_id.endswith("unlucky"):
                raise MemoryError
            admit(request_id, *args, **kwargs)

        monkeypatch.setattr(engine, "add_request", refuse)
        assert server.post("/v1/completions", {**LONG, "request_id": "unlucky"}).status_code == 500
        assert server.post("/v1/completions", {**LONG, "max_tokens": 3}).status_code == 200
        assert server.stats()["engine_restarts"] == 0


# -- a process of its own ------------------------------------------------------------------------------------------------


@contextmanager
def process(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`sparsespec serve` on a free port, once it is healthy."""
    port = free_port()
    source = Path(__file__).parent.parent / "src"
    command = [sys.executable, "-m", "sparsespec", "serve", str(tiny_directory()), "--host", "127.0.0.1", "--port", str(port),
               "--max-model-len", "4000", "--device", "cpu", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                assert server.poll() is None, server.communicate()[1]
                assert time.monotonic() < end, "the server did not come up"
                time.sleep(0.05)
        yield server, url
    finally:
        server.kill()
        server.communicate()


def test_sigterm_lets_streams_end_and_then_ends_them() -> None:
    """Within drain_timeout the short stream ends by itself; the long one is ended with what it has; exit code 0."""
    flags = ("--drain-timeout", "1.5", "--served-model-name", "a", "b", "--speculative-config", '{"method": "none"}',
             "--log-interval", "0.2")
    with process(*flags) as (server, url), httpx.Client(base_url=url, timeout=60) as client:
        assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["a", "b"]
        texts: dict[int, str] = {}

        def read(tokens: int) -> None:
            with httpx.Client(base_url=url, timeout=60) as own, own.stream("POST", "/v1/completions", json={
                    "prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}) as r:
                texts[tokens] = r.read().decode()

        threads = [threading.Thread(target=read, args=(tokens,)) for tokens in (50, 3900)]
        for thread in threads:
            thread.start()
        while client.get("/stats").json()["num_emitted_tokens"] < 10:
            time.sleep(0.01)
        start = time.monotonic()
        server.send_signal(signal.SIGTERM)
        time.sleep(0.4)
        with pytest.raises(httpx.TransportError):  # no new connections
            httpx.get(f"{url}/health")
        for thread in threads:
            thread.join(20)
        out, err = server.communicate(timeout=20)
        assert (server.returncode, out) == (0, "")
        assert 1.4 < time.monotonic() - start < 10
        for tokens, (reason, stop) in {50: ("length", None), 3900: ("abort", "shutdown")}.items():
            *chunks, done = [part.removeprefix("data: ") for part in texts[tokens].split("\n\n") if part]
            assert done == "[DONE]"
            last = json.loads(chunks[-1])["choices"][0]
            assert (last["finish_reason"], last["stop_reason"]) == (reason, stop)
        assert "generation:" in err  # the log line
        assert "Traceback" not in err


@pytest.mark.parametrize(("flags", "word"), [
    (["--port", "99999"], "port"), (["--model", "other"], "--model"), (["--enable-auto-tool-choice"], "tool_call_parser"),
    (["--max-num-seqs", "0"], "max_num_seqs"), (["--speculative-config", "[]"], "speculative-config")])
def test_settings_that_are_wrong_end_with_one_line(flags: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tiny_directory()), *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert word in err


def test_flags_are_those_of_vllm() -> None:
    args = build_parser().parse_args([
        "serve", "some/model", "--host", "0.0.0.0", "--port", "9000", "--api-key", "a", "b", "--served-model-name", "m",
        "--max-model-len", "4096", "--max-num-seqs", "64", "--gpu-memory-utilization", "0.9", "--kv-offloading-size", "4",
        "--speculative-config", '{"method": "pillar", "num_speculative_tokens": 8}', "--speculative-config.min-budget", "64",
        "--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--tensor-parallel-size", "2",
        "--uvicorn-log-level", "warning", "--disable-uvicorn-access-log", "--dtype", "bfloat16", "--seed", "1"])
    config = server_config(args)
    assert (config.port, config.api_key, config.served_model_name) == (9000, ["a", "b"], ["m"])
    assert (config.reasoning_parser, config.tool_call_parser, config.enable_auto_tool_choice) == ("qwen3", "hermes", True)
    settings = engine_kwargs(args)
    assert settings["speculative_config"] == {"method": "pillar", "num_speculative_tokens": 8, "min_budget": 64}
    assert (args.model_tag, settings["max_model_len"], settings["tensor_parallel_size"]) == ("some/model", 4096, 2)
