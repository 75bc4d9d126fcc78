"""A real server on a free port, in a thread of the tests' process, with a model that answers in milliseconds."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparsespec import LLM
from sparsespec.config import EngineConfig, LoadConfig, ServerConfig
from sparsespec.engine.engine import Engine
from sparsespec.loader import load_model
from sparsespec.loader.loaded import LoadedModel
from sparsespec.server.app import create_app
from sparsespec.server.serve import DrainingServer, make_server
from sparsespec.server.service import Service
from sparsespec.testing import tiny_qwen3

TEMPLATE = ("{% if tools %}<|tools|>{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if think %}<think>{% endif %}{% endif %}")
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>"]
VOCAB = 256 + len(SPECIAL)


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, so text is anything at all, broken characters included; and a few special ones. None ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL[:4]])
    backend.add_tokens([AddedToken(t, normalized=False) for t in SPECIAL[4:]])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE,
                                   clean_up_tokenization_spaces=False)


@cache
def tiny_directory() -> Path:
    """A tiny Qwen3 with the byte tokenizer beside it."""
    path = tiny_qwen3(seed=3, vocab_size=VOCAB, max_position_embeddings=4096)
    byte_tokenizer().save_pretrained(str(path))
    return path


@cache
def tiny_loaded() -> LoadedModel:
    return load_model(LoadConfig(model=str(tiny_directory()), device="cpu"))


def engine_config(**settings: Any) -> EngineConfig:
    """Always drafts, with views small enough for short contexts."""
    spec = {"num_speculative_tokens": 4, "min_budget": 16, "adaptive": False}
    return EngineConfig.from_kwargs(**{"max_model_len": 512, "max_num_seqs": 32, "kv_cache_tokens": 16384, "device": "cpu",
                                       "speculative_config": spec, **settings})


class Running:
    """A server that runs. `url` has no /v1."""

    def __init__(self, server: DrainingServer, service: Service, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.server, self.service, self.loop = server, service, loop
        self.url = f"http://127.0.0.1:{port}"

    def client(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 60, **settings})

    def async_client(self, **settings: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 60, **settings})

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **kwargs)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **kwargs)

    def engine(self) -> Engine:
        """The engine, for test doors that are set while it is idle."""
        async def get() -> Engine:
            return await self.service.engine.call(lambda e: e)

        return asyncio.run_coroutine_threadsafe(get(), self.loop).result(30)

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/stats").json()
        return found

    def wait_idle(self, seconds: float = 2.0) -> dict[str, Any]:
        """Stats once nothing runs or waits and all pages are free; fails after `seconds`."""
        return self.wait(lambda s: (s["running"], s["waiting"], s["device_pages_free"]) == (0, 0, s["device_pages_total"]), seconds)

    def wait(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 5.0) -> dict[str, Any]:
        """Stats once they meet a condition; fails after `seconds`."""
        end = time.monotonic() + seconds
        while not condition(s := self.stats()):
            assert time.monotonic() < end, f"not within {seconds} s: {s}"
            time.sleep(0.01)
        return s


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def serving(loaded: LoadedModel | None = None, config: ServerConfig | None = None, make_engine: Callable[[], Engine] | None = None,
            **settings: Any) -> Iterator[Running]:
    """Serve a model (the tiny one) while open. settings: the engine's. At the end nothing may be left in the engine."""
    config = config or ServerConfig()
    port = free_port()
    config = ServerConfig(**{**vars(config), "host": "127.0.0.1", "port": port})
    engine = Engine(engine_config(**settings), loaded or tiny_loaded())
    app = create_app(engine, config, make_engine=make_engine)
    server = make_server(app, config)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve()), daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < end, "the server did not start"
        time.sleep(0.005)
    running = Running(server, app.state.service, port, loop)
    try:
        yield running
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"
        loop.close()


def offline(loaded: LoadedModel | None = None, **settings: Any) -> LLM:
    """An LLM as the server's engine is set up."""
    config = engine_config(**settings)
    llm = LLM.__new__(LLM)
    llm.engine, llm._count = Engine(config, loaded or tiny_loaded()), 0
    return llm


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream that was read whole, parsed; the last is "[DONE]"."""
    return [line if line == "[DONE]" else json.loads(line) for line in
            (part.removeprefix("data: ") for part in response.text.split("\n\n") if part)]
