"""The prompts of one dataset at one context length, the same for every cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsespec.bench.datasets import Dataset, build
from sparsespec.bench.lab.options import LabOptions
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.llm import LLM
from sparsespec.loader.loaded import LoadedModel

_SPARE = 64


@dataclass(frozen=True)
class Context:
    """asked: the context length that was asked for, if any. written: prompts hold an answer in the middle of being written,

    which is kept from ending in the measured part too.
    """

    dataset: str
    asked: int | None
    prompts: list[list[int]]
    written: bool

    def params(self, temperature: float, tokens: int, room: int) -> SamplingParams:
        """For `tokens` measured tokens, with room for a round more, so that no measured round is cut short."""
        return SamplingParams(temperature=temperature, max_tokens=tokens + room, min_tokens=tokens if self.written else 0,
                              detokenize=False)


def prepare(dataset: Dataset, length: int | None, llm: LLM, options: LabOptions, settings: dict[str, Any]) -> Context:
    """Prompts as token ids. Questions whose prompt is shorter than `length` are answered up to it by plain decoding."""
    items = build(dataset, llm, options.num_prompts, length, seed=settings.get("seed", 0))
    prompts = [llm.engine.admission.tokenize(item.prompt)[1] for item in items]
    if dataset.kind != "chat" or length is None:
        return Context(dataset.name, length, prompts, written=False)
    return Context(dataset.name, length, _write(llm.loaded, prompts, length, options, settings), written=True)


def _write(loaded: LoadedModel, prompts: list[list[int]], length: int, options: LabOptions,
           settings: dict[str, Any]) -> list[list[int]]:
    """Each prompt and the beginning of an answer, `length` tokens together; a longer prompt stays as it is."""
    llm = LLM(loaded, speculative_config={"method": "none"}, **{
        **settings, "max_num_seqs": len(prompts), "kv_cache_tokens": len(prompts) * (max(length, *map(len, prompts)) + _SPARE)})
    short = [i for i, ids in enumerate(prompts) if len(ids) < length]
    if not short:
        return prompts
    params = [SamplingParams(temperature=options.write_temperature, max_tokens=length - len(prompts[i]),
                             min_tokens=length - len(prompts[i]), detokenize=False) for i in short]
    outputs = llm.generate([{"prompt_token_ids": prompts[i]} for i in short], params, use_tqdm=False)
    done = list(prompts)
    for i, output in zip(short, outputs, strict=True):
        done[i] = [*prompts[i], *output.outputs[0].token_ids]
    return done
