"""Throughput of one batch: plain decoding against self-speculation on the same weights, outputs compared token by token.

sparsespec bench throughput --compare none --show-answers
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sparsespec.bench.compare import Difference, differences, explained, measure_gaps
from sparsespec.bench.datasets import Item, build, load
from sparsespec.bench.options import ThroughputOptions
from sparsespec.config import SpeculativeConfig
from sparsespec.core.outputs import RequestOutput
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.llm import LLM

_COUNTERS = ("iterations", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position", "drafted_per_position",
             "num_emitted_tokens", "gemm_rows", "kv_bytes_read")
_WARM_UP_TOKENS = 8


@dataclass
class Pass:
    """One way to decode the batch. counters: of the last timed pass; seconds: the median over all of them."""

    name: str
    seconds: float
    outputs: list[RequestOutput]
    counters: dict[str, Any]
    draft_length: int  # what the adaptive mode uses at the end

    @property
    def token_ids(self) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in self.outputs]

    def figures(self) -> dict[str, Any]:
        """What the report shows, as plain data. accepted: drafts accepted a round; by_position: of those drafted there."""
        c = self.counters
        places = zip(c["accepted_per_position"], c["drafted_per_position"], strict=True)
        tokens, rounds = sum(map(len, self.token_ids)), c["num_drafts"]
        return {
            "name": self.name, "seconds": self.seconds, "tokens": tokens, "tokens_per_second": tokens / self.seconds,
            "iterations": c["iterations"], "gemm_rows_per_iteration": c["gemm_rows"] / max(c["iterations"], 1),
            "kv_bytes_per_token": c["kv_bytes_read"] / max(tokens, 1),
            "kv_gigabytes_per_second": c["kv_bytes_read"] / self.seconds / 1e9,
            "rounds": rounds, "drafted_per_round": c["num_draft_tokens"] / rounds if rounds else None,
            "accepted_per_round": c["num_accepted_tokens"] / rounds if rounds else None,
            "accepted_by_position": [n / d for n, d in places if d],
            "draft_length_at_end": self.draft_length,
        }


@dataclass
class Report:
    """Everything measured. The first of `passes` is the baseline where there is a comparison."""

    model: str
    device: str
    dtype: str
    items: list[Item]
    passes: list[Pass]
    compared: bool
    different: dict[str, list[Difference]] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        return not any(self.different.values())

    @property
    def passed(self) -> bool:
        """False where outputs differ by more than rounding can explain."""
        return all(explained(found, self.dtype) for found in self.different.values())


def _variants(options: ThroughputOptions, spec: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(name, speculative_config) of each pass. Without a comparison only what was asked for runs."""
    method = SpeculativeConfig.from_dict(spec).method
    if options.compare is None or method == options.compare:
        return [("plain" if method == "none" else method, spec)]
    plain = ("plain", {"method": options.compare})
    if "adaptive" in spec:
        return [plain, (f"{method}, {'adaptive' if spec['adaptive'] else 'always'}", spec)]
    return [plain, (f"{method}, always", {**spec, "adaptive": False}), (f"{method}, adaptive", {**spec, "adaptive": True})]


def _counters(llm: LLM) -> dict[str, Any]:
    stats = llm.stats()
    return {name: stats[name] for name in _COUNTERS}


def _minus(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """after - before for numbers and for lists, which may have grown."""
    out: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, list):
            old = before[name] + [0] * (len(value) - len(before[name]))
            out[name] = [a - b for a, b in zip(value, old, strict=True)]
        else:
            out[name] = value - before[name]
    return out


def _run_pass(llm: LLM, name: str, items: Sequence[Item], params: Sequence[SamplingParams], *, repeat: int,
              progress: bool) -> Pass:
    prompts = [item.prompt for item in items]
    if progress:
        print(f"{name}:", file=sys.stderr)
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=_WARM_UP_TOKENS, ignore_eos=True), use_tqdm=False)
    seconds, outputs, counters = [], [], {}
    for _ in range(repeat):
        before, start = _counters(llm), time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=progress)
        seconds.append(time.perf_counter() - start)
        counters = _minus(_counters(llm), before)
    return Pass(name, median(seconds), outputs, counters, llm.stats()["draft_length"])


def run(options: ThroughputOptions, engine: dict[str, Any], *, progress: bool = True) -> Report:
    """Run the batch once for each variant on the same loaded weights.

    engine: keyword arguments of LLM. Prompts are computed anew in every pass: prefix caching is off unless asked for.
    """
    engine = {"enable_prefix_caching": False, **engine}
    model, spec = engine.pop("model", None), engine.pop("speculative_config", None) or {}
    passes: list[Pass] = []
    items: list[Item] = []
    params: list[SamplingParams] = []
    llm: LLM | None = None
    dataset = load(options.dataset)
    for name, config in _variants(options, spec):
        loaded = llm.loaded if llm else model
        del llm  # its KV cache goes before the next one is made
        llm = LLM(loaded, speculative_config=config, **engine)
        if not items:
            items = build(dataset, llm, options.num_prompts, options.input_len, seed=engine.get("seed", 0),
                          scale=options.length_scale)
            params = [SamplingParams(temperature=options.temperature, max_tokens=item.max_tokens or options.max_tokens,
                                     ignore_eos=dataset.kind in ("ids", "trace")) for item in items]
        passes.append(_run_pass(llm, name, items, params, repeat=options.repeat, progress=progress))
    assert llm is not None
    loaded = llm.loaded
    report = Report(loaded.name, str(loaded.device), str(loaded.dtype), items, passes, len(passes) > 1 and params[0].greedy)
    if report.compared:
        base, ids = passes[0].token_ids, [o.prompt_token_ids for o in passes[0].outputs]
        report.different = {p.name: differences(base, p.token_ids) for p in passes[1:]}
        if not report.identical:
            del llm
            plain = LLM(loaded, speculative_config={"method": "none"}, **engine)
            report.different = {name: measure_gaps(plain, ids, base, d) for name, d in report.different.items()}
    return report
