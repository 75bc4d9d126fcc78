"""What the verification modes gain: the CPU's work beside the device's, and the slots that wait for results.

    python benchmarks/pipeline.py --json results/pipeline.json

Two parts. counted: a device whose step takes D and a CPU whose commit takes C, on a clock that is only counted, so that the
figures are exact: time of an iteration, and tokens in a given time relative to sync. slept: the same in real time, with a
device that sleeps and a CPU that is busy. (A model that runs on the CPU itself shares the cores with what would overlap.)
All drafts see everything and are accepted, so that a round gives k + 1 tokens in each mode; the requests never end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from sparsespec import LLM, SamplingParams
from sparsespec.testing import scripted, timed_device

MODES = ("sync", "delayed", "device")
_WARM_UP = 30  # iterations until the buckets are level


def start(model: Any, mode: str, k: int, running: int, tokens: int) -> LLM:
    """An engine with `running` requests at steady state that want `tokens` tokens each."""
    config = {"num_speculative_tokens": k, "sparse_attn_ratio": 1.0, "adaptive": False, "verification": mode}
    length = tokens + 64
    llm = LLM(model, kv_cache_tokens=running * length, max_model_len=length, max_num_seqs=running, speculative_config=config)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for i in range(running):
        llm.engine.add_request(str(i), {"prompt_token_ids": [i % 50 + 2, 3, 4, 5]}, params)
    return llm


def rate(llm: LLM, clock: Callable[[], float], iterations: int) -> dict[str, float]:
    """Of `iterations` steps after some to warm up: time of each, tokens in a unit of time, share of slots that sat out."""
    for _ in range(_WARM_UP):
        llm.engine.step()
    before, start = llm.stats(), clock()
    for _ in range(iterations):
        llm.engine.step()
    after, spent = llm.stats(), clock() - start
    steps = after["iterations"] - before["iterations"]
    running = after["running"]
    return {"iteration": spent / steps, "tokens": (after["num_emitted_tokens"] - before["num_emitted_tokens"]) / spent,
            "stalled": (after["num_stalled_slots"] - before["num_stalled_slots"]) / (steps * running)}


def follow(token: int, position: int) -> int:
    return (token + 1) % 256


def counted(k: int, running: int, step: float, commit: float, mode: str, iterations: int) -> dict[str, float]:
    llm = start(scripted(follow), mode, k, running, (iterations + _WARM_UP) * 2 + 64)
    with timed_device(llm, step=step, commit=commit) as clock:
        return rate(llm, lambda: clock.now, iterations)


@contextmanager
def slowed(llm: LLM, step: float, commit: float) -> Iterator[None]:
    """Steps that sleep for `step` seconds more, and commits that keep a core busy for `commit` seconds more."""
    engine = llm.engine
    execute, take = engine.runner.execute, engine.scheduler.commit

    def slow_execute(plan: Any) -> Any:
        time.sleep(step)
        return execute(plan)

    def slow_commit(plan: Any, result: Any) -> Any:
        end = time.perf_counter() + commit
        while time.perf_counter() < end:
            pass
        return take(plan, result)

    with mock.patch.object(engine.runner, "execute", slow_execute), mock.patch.object(engine.scheduler, "commit", slow_commit):
        yield


def slept(k: int, running: int, step: float, commit: float, mode: str, iterations: int) -> dict[str, float]:
    llm = start(scripted(follow), mode, k, running, (iterations + _WARM_UP) * 2 + 64)
    with slowed(llm, step / 1e3, commit / 1e3):
        return rate(llm, lambda: time.perf_counter() * 1e3, iterations)


def compare(name: str, run: Callable[[str], dict[str, float]], k: int) -> dict[str, Any]:
    """All modes, relative to sync; prints a line each."""
    found = {mode: run(mode) for mode in MODES}
    for mode, f in found.items():
        f["gain"] = f["tokens"] / found["sync"]["tokens"]
        print(f"{name:34s} {mode:8s} {f['iteration']:9.2f} {f['gain']:7.3f} {f['stalled']:9.4f}   {1 / (k + 2):.4f}", flush=True)
    return {"case": name, "k": k, "modes": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=8, help="drafts a round")
    parser.add_argument("--running", type=int, default=20, help="requests")
    parser.add_argument("--iterations", type=int, default=180, help="a multiple of (k + 1)(k + 2) counts whole rounds")
    parser.add_argument("--part", choices=("counted", "slept", "all"), default="all")
    parser.add_argument("--json", type=Path, help="write the figures there")
    a = parser.parse_args()
    print(f"{'case':34s} {'mode':8s} {'iteration':>9s} {'tokens':>7s} {'stalled':>9s}   1/(k+2)")
    cases = []
    for step, commit in ((8, 1), (8, 2), (8, 4), (8, 8), (4, 8)):
        if a.part in ("counted", "all"):
            cases.append(compare(f"counted, D = {step}, C = {commit}",
                                 lambda mode, d=step, c=commit: counted(a.k, a.running, d, c, mode, a.iterations), a.k))
    for step, commit in ((30, 5), (30, 15), (30, 30)):
        if a.part in ("slept", "all"):
            cases.append(compare(f"slept, + {step} ms, + {commit} ms",
                                 lambda mode, d=step, c=commit: slept(a.k, a.running, d, c, mode, a.iterations), a.k))
    if a.json:
        a.json.parent.mkdir(parents=True, exist_ok=True)
        a.json.write_text(json.dumps({"arguments": {**vars(a), "json": None}, "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
