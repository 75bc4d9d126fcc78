"""What HTTP costs: tokens a second through the server against the same requests given to the engine directly, in turn.

    python benchmarks/server.py --streams 64 --max-tokens 64 --repeats 3
    python benchmarks/server.py --model Qwen/Qwen3-8B --max-tokens 512 -- --gpu-memory-utilization 0.4

The server is a process of its own (`sparsespec serve`, with the flags after `--`, which the engine here gets too); the
clients read their streams in this one, and a third process asks for /health all the while. Outputs of both ways are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing as mp
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

_WARM = 8  # requests before anything is timed
_PROBE_EVERY = 0.05


def probe(port: int, stop: Event, pipe: Connection) -> None:
    """Ask for /health again and again on one connection until told to stop; sends True at the first answer, then all seconds."""
    connection, times = http.client.HTTPConnection("127.0.0.1", port), list[float]()
    while not stop.is_set():
        start = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        times.append(time.perf_counter() - start)
        if len(times) == 1:
            pipe.send(True)
        time.sleep(_PROBE_EVERY)
    pipe.send(times)


async def stream(port: int, body: dict[str, Any]) -> bytes:
    """One streamed completion, as it came over the wire: parsed later, so that the client costs little."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
                 b"Content-Length: %d\r\n\r\n" % len(data) + data)
    answer = await reader.read(-1)
    writer.close()
    return answer


def text_of(answer: bytes) -> tuple[str, int]:
    """(text, tokens) of a stream."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise RuntimeError(answer[:500].decode())
    body = b""
    while rest:  # chunked encoding
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[:int(size, 16)], rest[int(size, 16) + 2:]
    events = [json.loads(e.removeprefix("data: ")) for e in body.decode().split("\n\n") if e and not e.endswith("[DONE]")]
    return "".join(c["text"] for e in events for c in e["choices"]), events[-1]["usage"]["completion_tokens"]


class Bench:
    """Both ways for one set of requests."""

    def __init__(self, args: argparse.Namespace, port: int) -> None:
        from sparsespec import LLM
        from sparsespec.cli.flags import engine_kwargs
        from sparsespec.cli.main import build_parser

        flags = ["serve", *([args.model] if args.model else []), *args.flags]
        self.llm = LLM(args.model, **engine_kwargs(build_parser().parse_args(flags)))
        self.args, self.port = args, port
        rng = random.Random(0)
        size = self.llm.loaded.config.vocab_size
        self.prompts = [rng.choices(range(size), k=args.prompt_len) for _ in range(args.streams)]
        self.settings = {"temperature": 0.8, "max_tokens": args.max_tokens, "ignore_eos": True}

    def offline(self, count: int) -> tuple[float, list[str]]:
        """(seconds, texts)."""
        from sparsespec import SamplingParams

        start = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in self.prompts[:count]],
                                    [SamplingParams(**self.settings, seed=i) for i in range(count)], use_tqdm=False)
        return time.perf_counter() - start, [o.outputs[0].text for o in outputs]

    def served(self, count: int) -> tuple[float, list[str], list[float]]:
        """(seconds, texts, seconds of each /health)."""
        bodies = [{**self.settings, "prompt": p, "seed": i, "stream": True, "stream_options": {"include_usage": True}}
                  for i, p in enumerate(self.prompts[:count])]

        async def every() -> list[bytes]:
            return await asyncio.gather(*(stream(self.port, body) for body in bodies))

        context = mp.get_context("spawn")
        stop, (mine, its) = context.Event(), context.Pipe()
        prober = context.Process(target=probe, args=(self.port, stop, its))
        prober.start()
        mine.recv()
        start = time.perf_counter()
        answers = asyncio.run(every())
        seconds = time.perf_counter() - start
        stop.set()
        health = mine.recv()
        prober.join()
        texts, tokens = zip(*map(text_of, answers), strict=True)
        if set(tokens) != {self.args.max_tokens}:
            raise RuntimeError(f"streams of {set(tokens)} tokens, not {self.args.max_tokens}")
        return seconds, list(texts), health


def start_server(args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], int]:
    """A server that answers /health."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "sparsespec", "serve", *([args.model] if args.model else []), "--port", str(port),
               "--host", "127.0.0.1", "--uvicorn-log-level", "warning", "--disable-uvicorn-access-log", *args.flags]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=None if args.verbose else subprocess.DEVNULL,
                              env={**os.environ})
    while server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return server, port
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the server did not start; --verbose shows why")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="none: the embedded default")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--verbose", action="store_true", help="show the server's log")
    parser.add_argument("flags", nargs="*", help="flags of `sparsespec serve` for engine and server, after --")
    args = parser.parse_args()
    server, port = start_server(args)
    try:
        bench = Bench(args, port)
        bench.offline(_WARM)
        bench.served(_WARM)
        ratios, health, differing = [], [], 0
        for turn in range(args.repeats):
            direct, expected = bench.offline(args.streams)
            served, texts, times = bench.served(args.streams)
            total = args.streams * args.max_tokens
            ratios.append(direct / served)
            health += times
            differing += sum(a != b for a, b in zip(expected, texts, strict=True))
            print(f"{turn + 1}: engine {total / direct:.1f} tokens/s, server {total / served:.1f}, ratio {ratios[-1]:.3f}; /health "
                  f"median {1000 * statistics.median(times):.1f} ms, worst {1000 * max(times):.1f} ms of {len(times)}", flush=True)
    finally:
        server.terminate()
        server.wait(60)
    p99 = sorted(health)[min(int(0.99 * len(health)), len(health) - 1)]
    result = {"ratio": statistics.median(ratios), "ratios": ratios, "health_p99_ms": 1000 * p99, "health_probes": len(health),
              "differing_outputs": differing, "streams": args.streams, "max_tokens": args.max_tokens, "prompt_len": args.prompt_len}
    print(f"median ratio {result['ratio']:.3f}; /health p99 {result['health_p99_ms']:.1f} ms; {differing} outputs differ")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
