"""The KV manager under a load of three times its pool: a real engine with a tiny model, against one whose pool holds everything.

    python benchmarks/kv.py --requests 96 --json results/kv.json

Reported: pool use while requests wait or are away, tokens computed again, whether outputs equal those of the big pool, whether
requests start in the order of their arrival, and how many iterations each waited: to start, and later between two tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sparsespec import LLM, SamplingParams
from sparsespec.testing import check_integrity, tiny_qwen3

MOST_PROMPT, LEAST_OUTPUT, MOST_OUTPUT, K = 60, 60, 300, 4


class Load:
    """Requests with random prompts and lengths, all there from the start."""

    def __init__(self, model: str, requests: int, seed: int) -> None:
        rng = random.Random(seed)
        self.model = model
        self.prompts = [[rng.randrange(90) for _ in range(rng.randint(8, MOST_PROMPT))] for _ in range(requests)]
        self.outputs = [rng.randint(LEAST_OUTPUT, MOST_OUTPUT) for _ in range(requests)]
        self.total = sum(map(len, self.prompts)) + sum(self.outputs)

    def engine(self, pool_tokens: int, policy: str, host_gib: float | None) -> LLM:
        """An engine that admits as many as fit."""
        spec = {"num_speculative_tokens": K, "min_budget": 16, "adaptive": False, "kv_policy": policy}
        return LLM(self.model, device="cpu", max_num_seqs=len(self.prompts), max_model_len=MOST_PROMPT + MOST_OUTPUT + 1,
                   kv_cache_tokens=pool_tokens, kv_offloading_size=host_gib, enable_prefix_caching=False, page_size=16,
                   skip_tokenizer_init=True, speculative_config=spec)

    def run(self, name: str, llm: LLM, check: bool) -> tuple[list[list[int]], dict[str, Any]]:
        """Output ids, and the figures."""
        engine, count = llm.engine, len(self.prompts)
        for i, (prompt, tokens) in enumerate(zip(self.prompts, self.outputs, strict=True)):
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params, stream=True)
        ids: list[list[int]] = [[] for _ in range(count)]
        last, start_wait, longest = np.zeros(count, int), np.full(count, -1), np.zeros(count, int)
        use, now, first = [], 0, [0.0] * count
        with tqdm(total=count, desc=name) as bar:
            while engine.has_work():
                outputs = engine.step()
                now += 1
                stats = llm.stats()
                if stats["waiting"] or stats["swapped"]:
                    use.append(1 - stats["device_pages_free"] / stats["device_pages_total"])
                for out in outputs:
                    i = int(out.request_id)
                    if start_wait[i] < 0:
                        start_wait[i] = now
                    else:
                        longest[i] = max(longest[i], now - last[i])
                    last[i], ids[i], first[i] = now, out.outputs[0].token_ids, out.metrics.first_scheduled_time or 0.0
                    bar.update(int(out.finished))
                if check:
                    check_integrity(llm)
        stats = llm.stats()
        return ids, {
            "name": name, "iterations": now, "pool_tokens": stats["device_pages_total"] * 16, "load_tokens": self.total,
            "pool_use": float(np.mean(use)) if use else None, "iterations_under_pressure": len(use),
            "recomputed_tokens": stats["num_recomputed_tokens"], "offloaded_tokens": stats["offloaded_tokens"],
            "preemptions": stats["num_preemptions"], "first_in_first_out": first == sorted(first),
            "start_wait": {"max": int(start_wait.max()), "p99": float(np.percentile(start_wait, 99))},
            "later_wait": {"max": int(longest.max()), "p99": float(np.percentile(longest, 99))},
        }


def main() -> None:
    """See the module. Exit code 1 where outputs differ or order was not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--over", type=float, default=3.0, help="load over pool")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="check the integrity of both pools after every step")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = Load(str(tiny_qwen3(seed=1, vocab_size=100, max_position_embeddings=1024)), args.requests, args.seed)
    small = int(load.total / args.over)
    expected, big = load.run("big pool", load.engine(2 * load.total, "offload", None), False)
    rows, same = [big], True
    for policy, host in (("offload", 0.25), ("recompute", None), ("reserve", None)):
        ids, figures = load.run(policy, load.engine(small, policy, host), args.check)
        figures["outputs_equal"] = ids == expected
        same &= figures["outputs_equal"] and figures["first_in_first_out"]
        rows.append(figures)
    print(f"{'':10} {'iterations':>10} {'pool use':>9} {'recomputed':>10} {'offloaded':>9} {'FIFO':>5} {'equal':>6}"
          f" {'start wait p99, max':>20} {'later wait p99, max':>20}")
    for r in rows:
        use = "-" if r["pool_use"] is None else f"{r['pool_use']:.1%}"
        waits = [f"{r[w]['p99']:.0f}, {r[w]['max']}" for w in ("start_wait", "later_wait")]
        print(f"{r['name']:10} {r['iterations']:10} {use:>9} {r['recomputed_tokens']:10} {r['offloaded_tokens']:9} "
              f"{r['first_in_first_out']!s:>5} {r.get('outputs_equal', '-')!s:>6} {waits[0]:>20} {waits[1]:>20}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
