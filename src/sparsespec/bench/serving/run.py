"""Sends prompts to a server at a rate and reports what its users would see.

    sparsespec serve --port 8000 &
    sparsespec bench serve --port 8000 --dataset-name reasoning --num-prompts 64 --request-rate 4
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sparsespec.bench.options import ServeOptions
from sparsespec.bench.serving.client import Answer, Client
from sparsespec.bench.serving.prompts import Prompt, make_prompts
from sparsespec.bench.serving.report import error_summary, figures, speculation
from sparsespec.core.errors import StateError


def gaps(options: ServeOptions) -> list[float]:
    """Seconds before each request: a gamma distribution of shape `burstiness`, which 1 makes a Poisson process."""
    if math.isinf(options.request_rate):
        return [0.0] * options.num_prompts
    rng = random.Random(options.seed)
    scale = 1 / (options.request_rate * options.burstiness)
    return [rng.gammavariate(options.burstiness, scale) for _ in range(options.num_prompts)]


async def _load(client: Client, options: ServeOptions, prompts: list[Prompt], bar: tqdm[Any]) -> tuple[list[Answer], float]:
    """All requests at their times; the answers in the prompts' order, and the seconds until the last ended."""
    limit = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else nullcontext()
    began = time.perf_counter()

    async def one(prompt: Prompt) -> Answer:
        async with limit:
            answer = await client.send(prompt.content, prompt.max_tokens, began)
        bar.update()
        return answer

    tasks, due = [], 0.0
    for prompt, gap in zip(prompts, gaps(options), strict=True):
        due += gap
        if (wait := due - (time.perf_counter() - began)) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(prompt)))
    answers = await asyncio.gather(*tasks)
    return list(answers), time.perf_counter() - began


async def _run(options: ServeOptions) -> dict[str, Any]:
    prompts = make_prompts(options)
    base: dict[str, Any] = {"temperature": options.temperature, "seed": options.seed}
    if options.ignore_eos:
        base["ignore_eos"] = True
    base |= options.extra
    client = Client(options.url, options.backend, options.endpoint, base, options.api_key)
    async with client.http:
        served = await client.model()
        base["model"] = options.model or served
        for _ in range(max(1, options.num_warmups)):
            first = await client.send(prompts[0].content, prompts[0].max_tokens, time.perf_counter())
            if first.error:
                raise StateError("bench serve", first.error, "the first request failed", "Correct what the server says of it")
        before = await client.metrics()
        with tqdm(total=len(prompts), desc="requests", file=sys.stderr) as bar:
            answers, duration = await _load(client, options, prompts, bar)
        drafted = speculation(before, await client.metrics())
    for error in error_summary(answers):
        print(f"failed: {error}", file=sys.stderr)
    rate: float | str = "inf" if math.isinf(options.request_rate) else options.request_rate
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"), "backend": options.backend, "endpoint_type": options.backend,
        "model_id": base["model"], "tokenizer_id": options.tokenizer or base["model"], "num_prompts": len(prompts),
        "request_rate": rate, "burstiness": options.burstiness, "max_concurrency": options.max_concurrency,
        **figures(answers, duration, options.metrics, options.percentiles), **(drafted.figures() if drafted else {}),
    }
    if options.save_detailed:
        fields = [asdict(a) for a in answers]
        result |= {"input_lens": [f["prompt_tokens"] for f in fields], "output_lens": [f["output_tokens"] for f in fields],
                   "ttfts": [f["ttft"] for f in fields], "itls": [f["itl"] for f in fields],
                   "start_times": [f["start"] for f in fields], "generated_texts": [f["text"] for f in fields],
                   "errors": [f["error"] for f in fields]}
    return result


def run(options: ServeOptions) -> dict[str, Any]:
    """The result document. Raises InvalidValueError without a server, StateError where its first request fails."""
    result = asyncio.run(_run(options))
    if options.save_result:
        rate = f"{options.request_rate:g}"
        name = options.result_filename or f"{options.backend}-{rate}qps-{Path(result['model_id']).name}-{result['date']}.json"
        path = Path(options.result_dir or ".") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result), encoding="utf-8")
        print(f"saved {path}", file=sys.stderr)
    return result
