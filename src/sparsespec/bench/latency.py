"""Seconds of one batch from its prompts to its last token, over several passes.

    sparsespec bench latency --batch-size 8 --input-len 32 --output-len 128
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from tqdm import tqdm

from sparsespec.bench.datasets.build import random_ids
from sparsespec.bench.options import LatencyOptions
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


def run(options: LatencyOptions, engine: dict[str, Any]) -> dict[str, Any]:
    """avg_latency, latencies and percentiles in seconds, under vLLM's names. engine: keyword arguments of LLM; prefixes are
    not cached unless asked for, since every pass has the same prompts."""
    llm = LLM(**{"enable_prefix_caching": False, **engine})
    items = random_ids(llm.loaded.config.vocab_size, options.batch_size, options.input_len, engine.get("seed", 0))
    prompts = [item.prompt for item in items]
    params = SamplingParams(temperature=options.temperature, max_tokens=options.output_len, n=options.n, ignore_eos=True,
                            detokenize=False)
    latencies = []
    for i in tqdm(range(options.num_iters_warmup + options.num_iters), desc="passes", file=sys.stderr):
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if i >= options.num_iters_warmup:
            latencies.append(time.perf_counter() - start)
    return {"avg_latency": float(np.mean(latencies)), "latencies": latencies,
            "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES}}
