"""Many clients at once, some of whom leave, abort or send nonsense; and requests that a fuzzer makes of the OpenAPI document."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from serving import Running, offline, serving
from sparsespec import SamplingParams
from sparsespec.config import ServerConfig

CLIENTS = 256
KINDS = 24  # different requests, whose outputs are known
PARAMS = [{"temperature": 0}, {"seed": 1}, {"seed": 2, "temperature": 1.5, "top_p": 0.9}, {"seed": 3, "stop": list("aeiounrst")}]


def request(kind: int) -> dict[str, Any]:
    rng = random.Random(kind)
    return {"prompt": [rng.randrange(256) for _ in range(rng.randrange(4, 60))], "max_tokens": rng.randrange(8, 40),
            **PARAMS[kind % len(PARAMS)]}


def expected() -> list[tuple[str, str | None]]:
    """(text, finish_reason) of each request, offline."""
    requests = [request(kind) for kind in range(KINDS)]
    outputs = offline().generate([{"prompt_token_ids": r.pop("prompt")} for r in requests], [SamplingParams(**r) for r in requests],
                                 use_tqdm=False)
    return [(o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


@dataclass
class Tally:
    """What the clients met. wrong: outputs that differ from the offline ones, and errors that nobody asked for."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    health: list[float] = field(default_factory=list)


async def client(http: httpx.AsyncClient, rng: random.Random, name: str, known: list[tuple[str, str | None]], tally: Tally) -> None:
    """One request; one in ten leaves early, is aborted or is malformed."""
    kind = rng.randrange(KINDS)
    body = {**request(kind), "stream": True, "request_id": name}
    mischief = rng.choice(["leave", "abort", "malformed"]) if rng.random() < 0.1 else None
    if mischief == "malformed":
        content = rng.choice([b"{", b"[]", b'{"prompt": 3}', b'{"prompt": "x", "n": -1}', b'{"prompt": "x", "what": 1}'])
        r = await http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        tally.ends["malformed"] += 1
        if r.status_code != 400 or "error" not in r.json():
            tally.wrong.append(f"{content!r}: {r.status_code}")
        return
    text, reason, after = "", None, rng.randrange(1, 4)
    async with http.stream("POST", "/v1/completions", json=body) as r:
        if r.status_code != 200:
            tally.wrong.append(f"{r.status_code}: {await r.aread()!r}")
            return
        count = 0
        async for line in r.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                tally.wrong.append(line)
                return
            choice = event["choices"][0]
            text, reason = text + choice["text"], choice["finish_reason"]
            count += 1
            if count == after and mischief == "leave":
                tally.ends["left"] += 1
                return
            if count == after and mischief == "abort":
                await http.post("/abort_request", json={"request_id": name})
    tally.ends[str(reason)] += 1
    whole, end = known[kind]
    if reason == "abort" and mischief == "abort":
        if not whole.startswith(text.rstrip("\ufffd")):  # half a character may be all there is of it
            tally.wrong.append(f"{name}: aborted with {text!r}, not a part of {whole!r}")
    elif (text, reason) != (whole, end):
        tally.wrong.append(f"{name}: {text!r} ({reason}), not {whole!r} ({end})")


async def probe(http: httpx.AsyncClient, tally: Tally) -> None:
    while True:
        start = time.perf_counter()
        if (await http.get("/health")).status_code != 200:
            tally.wrong.append("unhealthy")
        tally.health.append(time.perf_counter() - start)
        await asyncio.sleep(0.02)


async def crowd(server: Running, known: list[tuple[str, str | None]], seconds: float, rounds: int) -> Tally:
    """CLIENTS at once, each with at least `rounds` requests and as many as go into `seconds`."""
    tally, end = Tally(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=2 * CLIENTS + 8, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
        async def one(number: int) -> None:
            rng, turn = random.Random(number), 0
            while turn < rounds or time.monotonic() < end:
                try:
                    await client(http, rng, f"{number}-{turn}", known, tally)
                except httpx.HTTPError as e:
                    tally.wrong.append(f"{number}-{turn}: {e!r}")
                turn += 1

        prober = asyncio.create_task(probe(http, tally))
        await asyncio.gather(*map(one, range(CLIENTS)))
        prober.cancel()
    return tally


def check(server: Running, tally: Tally) -> None:
    assert not tally.wrong, f"{len(tally.wrong)} of {sum(tally.ends.values())}: {tally.wrong[:5]}"
    assert {"malformed", "left", "abort", "length", "stop"} <= set(tally.ends)
    server.wait_idle(2)
    assert server.service.engine.num_pending == 0
    assert not server.service.active


def test_256_clients() -> None:
    known = expected()
    with serving(max_num_seqs=64, config=ServerConfig(disable_uvicorn_access_log=True)) as server:
        tally = asyncio.run(crowd(server, known, 0, 1))
        assert sum(tally.ends.values()) == CLIENTS
        check(server, tally)


def resident() -> int:
    """Resident memory of this process in KiB, without what malloc keeps for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/status", encoding="ascii") as f:
        return int(next(line for line in f if line.startswith("VmRSS:")).split()[1])


@pytest.mark.slow
def test_256_clients_for_three_minutes() -> None:
    """Memory stays flat after the first 2000 requests, in which malloc finds its size: the server's and the clients'."""
    known = expected()
    with serving(max_num_seqs=64, config=ServerConfig(disable_uvicorn_access_log=True)) as server:
        asyncio.run(crowd(server, known, 0, 8))
        before = resident()
        tally = asyncio.run(crowd(server, known, 150, 1))
        check(server, tally)
        grown = resident() - before
        print(f"{sum(tally.ends.values())} requests: {dict(tally.ends)}; memory grew by {grown / 1024:.1f} MiB; "
              f"/health p99 {1000 * sorted(tally.health)[int(0.99 * len(tally.health))]:.1f} ms")
        assert grown < 32 * 1024


# -- fuzzing -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    with serving(max_model_len=64, kv_cache_tokens=2048, config=ServerConfig(disable_uvicorn_access_log=True)) as running:
        yield running


def test_fuzzed_requests_break_nothing(small: Running) -> None:
    """Whatever a body of the documented shape holds, no answer is a 5xx."""
    document = schemathesis.openapi.from_url(f"{small.url}/openapi.json")
    operations = [operation.ok() for operation in document.get_all_operations()]
    assert {o.path for o in operations} >= {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/abort_request"}
    for operation in operations:
        @given(case=operation.as_strategy())
        @settings(max_examples=25 if operation.method == "post" else 3, deadline=None, derandomize=True, database=None,
                  suppress_health_check=list(HealthCheck))
        def fuzz(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=[not_a_server_error], timeout=30)

        fuzz()


def test_nothing_is_left_of_them(small: Running) -> None:
    assert small.wait_idle(2)["engine_restarts"] == 0
    assert small.get("/health").status_code == 200
