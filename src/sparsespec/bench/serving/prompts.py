"""Prompts of a serving benchmark. No model is loaded for them: the server may be anybody's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsespec.core.errors import InvalidValueError

if TYPE_CHECKING:
    from sparsespec.bench.options import ServeOptions

_CHARACTERS = 4  # of a token, about, where a document is cut
_SAFE_IDS = (20, 220)  # ids that every vocabulary has, where no tokenizer says which there are
_FIELDS = ("prompt", "question", "problem", "instruction")


@dataclass(frozen=True)
class Prompt:
    """A text, or token ids for /v1/completions. max_tokens: most tokens of its answer."""

    content: str | list[int]
    max_tokens: int


def make_prompts(options: ServeOptions) -> list[Prompt]:
    """The prompts that the options ask for. Raises InvalidValueError for a file without prompts and for sets that are too small."""
    if options.dataset_name == "random":
        return _random(options)
    texts = _from_file(options) if options.dataset_name in ("custom", "sharegpt") else _from_set(options)
    if len(texts) < options.num_prompts and options.disable_oversample:
        raise InvalidValueError("num_prompts", options.num_prompts, f"{options.dataset_name} has {len(texts)} prompts",
                                f"Ask for at most {len(texts)}, or leave --disable-oversample out")
    rng = random.Random(options.seed)
    chosen = texts[:options.num_prompts]
    chosen += rng.choices(texts, k=options.num_prompts - len(chosen))
    return [Prompt(text, options.output_len) for text in chosen]


def _random(options: ServeOptions) -> list[Prompt]:
    rng = random.Random(options.seed)
    tokenizer = _tokenizer(options.tokenizer) if options.tokenizer else None
    if tokenizer is None and options.backend != "openai":
        raise InvalidValueError("tokenizer", None, "random chat messages are made from a tokenizer's ids",
                                "Give --tokenizer, or use --backend openai, which sends ids")
    low, high = (0, len(tokenizer)) if tokenizer else _SAFE_IDS
    prompts, lengths, spread = [], (options.random_input_len, options.output_len), options.random_range_ratio
    for _ in range(options.num_prompts):
        size, most = (max(1, round(n * rng.uniform(1 - spread, 1 + spread))) for n in lengths)
        ids = [rng.randrange(low, high) for _ in range(size)]
        prompts.append(Prompt(tokenizer.decode(ids) if tokenizer else ids, most))
    return prompts


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as e:
        raise InvalidValueError("tokenizer", name, f"not loaded ({e})", "Give a Hugging Face directory or name") from e


def _from_file(options: ServeOptions) -> list[str]:
    """Texts of records such as {"prompt": ...} (vLLM's custom) or {"conversations": [{"value": ...}, ...]} (ShareGPT)."""
    from sparsespec.bench.datasets.load import read_records

    if options.dataset_path is None:
        raise InvalidValueError("dataset_path", None, f"{options.dataset_name} is read from a file", "Give --dataset-path FILE")
    texts = []
    for record in read_records(Path(options.dataset_path)):
        turns = record.get("conversations") or record.get("conversation") or ()
        found = turns[0].get("value") if turns else next((record[f] for f in _FIELDS if f in record), None)
        if isinstance(found, str) and found:
            texts.append(found)
    if not texts:
        raise InvalidValueError("dataset_path", options.dataset_path, "holds no prompt",
                                f"Give records with one of: {', '.join(_FIELDS)}, conversations")
    return texts


def _from_set(options: ServeOptions) -> list[str]:
    from sparsespec.bench.datasets import load

    dataset = load(options.dataset_name if options.dataset_path is None else f"{options.dataset_name}={options.dataset_path}")
    if not dataset.entries:
        raise InvalidValueError("dataset_name", options.dataset_name, "has no texts",
                                "Use random, reasoning, code, longdoc or a file")
    cut = None if dataset.kind == "chat" else options.random_input_len * _CHARACTERS
    return [question.text[:cut] for question in dataset.entries]
