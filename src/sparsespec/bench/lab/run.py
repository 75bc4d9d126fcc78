"""Runs cells on contexts and gathers what they gave.

Every cell of a context decodes the same prompts with the same seeds on the same weights; only the draft policy, k and s
differ. Greedy outputs are compared with plain decoding, token by token.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from sparsespec.bench.compare import differences, explained, measure_gaps
from sparsespec.bench.datasets import load
from sparsespec.bench.lab.contexts import Context, prepare
from sparsespec.bench.lab.matrix import BASELINE, Cell
from sparsespec.bench.lab.options import LabOptions
from sparsespec.bench.lab.predict import Scenario, scenario
from sparsespec.bench.lab.tally import Tally, decode
from sparsespec.bench.prefill import PromptCache
from sparsespec.core.errors import InvalidValueError
from sparsespec.llm import LLM
from sparsespec.loader.loaded import LoadedModel

_RECOMPUTED = 64  # last prompt rows that each cell computes itself: policies may learn from them
_SPARE = 64  # tokens of room in the pool for each request beside what it decodes


@dataclass
class Report:
    """Everything measured. cells: plain data, see `Laboratory.measure`. left_out: policies of "all" that the engine refused."""

    model: str
    device: str
    dtype: str
    scenario: dict[str, Any]
    cells: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """False where a greedy output differs from plain decoding by more than rounding explains."""
        return not any(c["lossless"] is False for c in self.cells)


class Laboratory:
    """One model, loaded once. settings: keyword arguments of LLM; spec: the speculative_config that cells start from."""

    def __init__(self, options: LabOptions, engine: dict[str, Any]) -> None:
        settings = {"enable_prefix_caching": False, **engine}
        model = settings.pop("model", None)
        self.spec = settings.pop("speculative_config", None) or {}
        _refuse_own(settings, self.spec)
        self.options, self.settings = options, settings
        first = LLM(model, speculative_config={"method": "none"}, **{**settings, "max_num_seqs": 1, "kv_cache_tokens": 1024})
        self.llm = first  # builds prompts; its pool is small
        self.loaded: LoadedModel = first.loaded
        self.cache = PromptCache(self.loaded, **settings)
        self.kv_bytes = self.loaded.config.kv_bytes_per_token(self.loaded.dtype.itemsize)
        self.scenario: Scenario = scenario(options.gpu, options.gpu_model, options.gpu_batch, options.gpu_context, self.loaded)

    def contexts(self) -> Iterator[Context]:
        """Every dataset at every context length."""
        for spec in self.options.datasets:
            dataset = load(spec)
            for length in self.options.contexts or (None,):
                self.cache.clear()
                yield prepare(dataset, length, self.llm, self.options, self.settings)

    def decode(self, cell: Cell, context: Context, temperature: float) -> tuple[Tally, list[list[int]]]:
        """Run one cell. Raises InvalidValueError where the engine refuses its policy."""
        tokens, count, room = self.options.max_tokens, len(context.prompts), 2 * (cell.k or 0) + 2
        params = context.params(temperature, tokens, room)
        llm = LLM(self.loaded, speculative_config=cell.config(self.spec), **{
            **self.settings, "max_num_seqs": count,
            "kv_cache_tokens": count * (max(map(len, context.prompts)) + tokens + room + _SPARE),
            "max_num_batched_tokens": max(512, count * (_RECOMPUTED + room))})
        if self.options.reuse_prefill and not getattr(llm.engine.policy, "feature_layers", ()):  # those need the prompt's states
            return decode(llm.engine, self.cache.seat(llm, context.prompts, params, _RECOMPUTED), tokens)
        total, outputs = Tally(), []  # one after the other, so that no request decodes while another's prompt is computed
        for index, ids in enumerate(context.prompts):
            llm.engine.add_request(str(index), {"prompt_token_ids": ids}, params)
            tally, output = decode(llm.engine, list(llm.engine.scheduler.waiting), tokens)
            total.add(tally)
            outputs += output
        return total, outputs

    def measure(self, cell: Cell, context: Context, temperature: float, plain: Sequence[list[int]] | None) -> tuple[
            dict[str, Any], list[list[int]]]:
        """(what the cell gave as plain data, its outputs). plain: outputs to compare with, None where that makes no sense."""
        start = time.perf_counter()
        tally, outputs = self.decode(cell, context, temperature)
        seconds = time.perf_counter() - start
        found = tally.round(self.kv_bytes)
        different = differences(plain, outputs) if plain is not None else []
        if different:
            different = measure_gaps(self._plain_llm(context), context.prompts, plain or [], different)
        return {
            "dataset": context.dataset, "context": context.asked, "temperature": temperature,
            "policy": cell.policy, "method": cell.method, "k": cell.k, "s": cell.s, "curve": cell.curve,
            "prompts": len(context.prompts), "prompt_tokens": sum(map(len, context.prompts)) / len(context.prompts),
            **tally.figures(self.kv_bytes, self.options.context_bucket),
            "predicted_speedup": self.scenario.speedup(found, tally.context()) if found else None,
            "lossless": None if plain is None else explained(different, str(self.loaded.dtype)),
            "different_outputs": len(different), "seconds": seconds,
        }, outputs

    def _plain_llm(self, context: Context) -> LLM:
        length = max(map(len, context.prompts)) + self.options.max_tokens + _SPARE
        return LLM(self.loaded, speculative_config={"method": "none"},
                   **{**self.settings, "max_num_seqs": 1, "kv_cache_tokens": length})


def _refuse_own(settings: dict[str, Any], spec: dict[str, Any]) -> None:
    """Raise for settings that each cell sets for itself: to drop them silently would be worse."""
    for name, remedy in (("max_num_seqs", "Use num_prompts"), ("kv_cache_tokens", "Leave it out: the pool fits the prompts"),
                         ("max_num_batched_tokens", "Leave it out: a step carries the whole batch")):
        if name in settings:
            raise InvalidValueError(name, settings[name], "set by the benchmark", remedy)
    for name, option in (("method", "policies"), ("num_speculative_tokens", "k"), ("sparse_attn_ratio", "s")):
        if name in spec:
            raise InvalidValueError(f"speculative_config.{name}", spec[name], "set by the benchmark", f"Use {option}")


def run(options: LabOptions, cells: Sequence[Cell], engine: dict[str, Any], *, progress: bool = True) -> Report:
    """Measure every cell on every dataset, context and temperature."""
    lab = Laboratory(options, engine)
    report = Report(lab.loaded.name, str(lab.loaded.device), str(lab.loaded.dtype), lab.scenario.describe())
    drafting = [cell for cell in cells if cell.drafts]
    greedy = [t == 0 for t in options.temperatures]
    plain_cells = sum(g or len(drafting) < len(cells) for g in greedy)
    total = len(options.datasets) * max(len(options.contexts), 1) * (len(drafting) * len(greedy) + plain_cells)
    with tqdm(total=total, desc="cells", disable=not progress, file=sys.stderr, dynamic_ncols=True) as bar:
        for context in lab.contexts():
            for temperature in options.temperatures:
                plain = None
                for cell in ([BASELINE] if temperature == 0 or len(drafting) < len(cells) else []) + drafting:
                    bar.set_postfix_str(f"{context.dataset}, {cell.policy}")
                    try:
                        figures, outputs = lab.measure(cell, context, temperature, plain)
                    except InvalidValueError as e:
                        if not cell.optional:
                            raise
                        report.left_out[cell.policy] = " ".join(str(e).split())
                    else:
                        report.cells.append(figures)
                        if not cell.drafts and temperature == 0:
                            plain = outputs
                    bar.update()
    return report
