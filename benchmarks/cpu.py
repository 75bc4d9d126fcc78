"""Decoding on a CPU, as ratios within one run: against transformers, drafting against plain, adaptive against plain.

    python benchmarks/cpu.py --part all --json results/cpu.json

Every request of a cell holds the same prompt, computed once and copied to each request's own pages, so that only
decoding is timed. Beside each plain cell stands its roofline: the bytes that a step must read, at the read bandwidth
measured in the same run. Both engines of a pair live at once and take turns of a few iterations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from sparsespec import LLM, SamplingParams
from sparsespec.bench.prefill import PromptCache
from sparsespec.config import LoadConfig
from sparsespec.loader import default_model_path, load_model
from sparsespec.loader.loaded import LoadedModel

PLAIN = {"method": "none"}
_SLICE = 4  # iterations of one engine before the other takes its turn


def read_bandwidth() -> float:
    """Bytes a second of a large sum: what reading memory once can reach."""
    data = torch.randn(1 << 27)
    best = 0.0
    for _ in range(4):
        start = time.perf_counter()
        data.sum()
        best = max(best, data.numel() * 4 / (time.perf_counter() - start))
    return best


class Lane:
    """An engine whose time is taken while all its requests run."""

    def __init__(self, llm: LLM, batch: int) -> None:
        self.llm, self.batch, self.seconds = llm, batch, 0.0
        llm.engine.step()
        counters = llm.engine.scheduler.counters
        self._tokens, self._steps = counters.num_emitted_tokens, counters.iterations

    def advance(self, iterations: int) -> bool:
        """Some iterations; False once a request has ended."""
        start = time.perf_counter()
        for _ in range(iterations):
            self.llm.engine.step()
        self.seconds += time.perf_counter() - start
        return self.llm.engine.scheduler.num_running == self.batch

    def figures(self) -> dict[str, float]:
        """What was measured so far."""
        counters = self.llm.engine.scheduler.counters
        drafted = max(counters.num_drafts, 1)
        return {"tokens_per_second": (counters.num_emitted_tokens - self._tokens) / self.seconds,
                "ms_per_iteration": self.seconds * 1e3 / (counters.iterations - self._steps),
                "accepted": counters.num_accepted_tokens / drafted, "drafted": counters.num_draft_tokens / drafted}


class Decoding:
    """Engines whose requests start with a prompt already computed."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.cache = loaded, PromptCache(loaded)
        source = Path(torch.__file__).parent / "nn" / "modules" / "module.py"
        self.ids = loaded.tokenizer(source.read_text(encoding="utf-8"))["input_ids"]

    def start(self, batch: int, length: int, tokens: int, spec: dict[str, Any]) -> Lane:
        """An engine that decodes `batch` requests with a context of `length`."""
        llm = LLM(self.loaded, max_num_seqs=batch, kv_cache_tokens=batch * (length + tokens + 64), speculative_config=spec)
        self.cache.seat(llm, [self.ids[:length]] * batch, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        return Lane(llm, batch)

    def rate(self, batch: int, length: int, tokens: int, spec: dict[str, Any]) -> dict[str, float]:
        """Tokens a second while all `batch` requests run, and what the drafts did."""
        lane = self.start(batch, length, tokens, spec)
        while lane.advance(1):
            pass
        return lane.figures()

    def pair(self, batch: int, length: int, tokens: int, spec: dict[str, Any], repeats: int) -> dict[str, Any]:
        """Plain and `spec` in turn, some iterations each, so that both see the same weather; the median ratio."""
        runs = []
        for _ in range(repeats):
            lanes = self.start(batch, length, tokens, PLAIN), self.start(batch, length, tokens, spec)
            while all(lane.advance(_SLICE) for lane in lanes):
                pass
            runs.append([lane.figures() for lane in lanes])
        ratios = [other["tokens_per_second"] / plain["tokens_per_second"] for plain, other in runs]
        return {"batch": batch, "context": length, "spec": spec, "ratio": statistics.median(ratios), "ratios": ratios,
                "plain": runs[-1][0], "other": runs[-1][1]}


def against_transformers(loaded: LoadedModel, batch: int, tokens: int) -> dict[str, float]:
    """Batched greedy generate of transformers and our plain decoding of the same prompts of 64 tokens, prefill included."""
    from transformers import AutoModelForCausalLM

    path = default_model_path()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    source = (Path(torch.__file__).parent / "nn" / "modules" / "module.py").read_text(encoding="utf-8")
    prompts = torch.tensor(loaded.tokenizer(source)["input_ids"][:batch * 64]).view(batch, 64)
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    llm = LLM(loaded, max_num_seqs=batch, kv_cache_tokens=batch * (tokens + 96), speculative_config=PLAIN)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {"transformers": [], "plain": []}
    for _ in range(3):
        start = time.perf_counter()
        model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
        rates["transformers"].append(batch * tokens / (time.perf_counter() - start))
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in prompts.tolist()], params, use_tqdm=False)
        rates["plain"].append(batch * tokens / (time.perf_counter() - start))
    ratios = [ours / theirs for ours, theirs in zip(rates["plain"], rates["transformers"], strict=True)]
    return {**{name: statistics.median(r) for name, r in rates.items()}, "ratio": statistics.median(ratios)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "transformers", "acceptance", "drafts", "adaptive"), default="all")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each request")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    decoding = Decoding(load_model(LoadConfig(device="cpu", dtype="float32")))
    bandwidth = read_bandwidth()
    out: dict[str, Any] = {"read_gb_per_second": bandwidth / 1e9, "threads": torch.get_num_threads()}
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    if args.part in ("all", "transformers"):
        out["transformers"] = r = against_transformers(decoding.loaded, 8, args.tokens)
        print(f"transformers {r['transformers']:.1f} tok/s, plain {r['plain']:.1f} tok/s: {r['ratio']:.2f}x")
    if args.part in ("all", "acceptance"):
        out["acceptance"] = []
        for ratio in (0.05, 0.15):
            spec = {"num_speculative_tokens": 8, "sparse_attn_ratio": ratio, "min_budget": 64, "adaptive": False}
            out["acceptance"].append({"sparse_attn_ratio": ratio, **(r := decoding.rate(1, 3000, 200, spec))})
            print(f"3000 tokens of code, s = {ratio}: accepted {r['accepted']:.2f} of {r['drafted']:.2f}")
    cells: list[tuple[int, int, dict[str, Any]]] = []
    if args.part in ("all", "drafts"):
        cells += [(8, 4096, {"num_speculative_tokens": k, "sparse_attn_ratio": s, "adaptive": False})
                  for k, s in ((2, 0.05), (3, 0.05), (4, 0.05), (4, 0.15), (8, 0.05))]
    if args.part in ("all", "adaptive"):
        cells += [(b, n, {"num_speculative_tokens": 8}) for n in (256, 1024, 4096) for b in (1, 4, 8, 16)]
    out["cells"] = []
    model = decoding.loaded.config
    weights = 4 * model.weights_a_pass
    for batch, length, spec in tqdm(cells, desc="cells"):
        cell = decoding.pair(batch, length, args.tokens, spec, args.repeats)
        cell["roofline_ms"] = (weights + batch * length * model.kv_bytes_per_token(4)) / bandwidth * 1e3
        out["cells"].append(cell)
        tqdm.write(f"{batch:3d} x {length:4d} {spec}: plain {cell['plain']['ms_per_iteration']:.1f} ms/step "
                   f"(roofline {cell['roofline_ms']:.1f}), {cell['ratio']:.2f}x, accepted {cell['other']['accepted']:.2f} "
                   f"of {cell['other']['drafted']:.2f}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(out, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
