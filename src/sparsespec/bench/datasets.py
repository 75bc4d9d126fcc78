"""Prompts for benchmarks."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from sparsespec.core.errors import InvalidValueError

if TYPE_CHECKING:
    from sparsespec.llm import LLM


@dataclass(frozen=True)
class Item:
    """One prompt. name: for reports. question: as a person reads it, "" for random ids. prompt: as LLM.generate takes it."""

    name: str
    question: str
    prompt: dict[str, Any]


def problems() -> list[dict[str, str]]:
    """The reasoning problems shipped with the package: id, category, prompt."""
    loaded: list[dict[str, str]] = json.loads(files("sparsespec").joinpath("data/problems.json").read_text(encoding="utf-8"))
    return loaded


def reasoning(llm: LLM, count: int) -> list[Item]:
    """The first `count` problems, through the model's chat template where it has one."""
    every = problems()
    if count > len(every):
        raise InvalidValueError("num_prompts", count, f"the reasoning set has {len(every)} problems",
                                f"Give at most {len(every)}, or use --dataset random")
    template = bool(getattr(llm.get_tokenizer(), "chat_template", None))
    return [Item(p["id"], p["prompt"], llm.apply_chat_template([{"role": "user", "content": p["prompt"]}]) if template
                 else {"prompt": p["prompt"]}) for p in every[:count]]


def random_ids(vocab_size: int, count: int, length: int, seed: int) -> list[Item]:
    """`count` prompts of `length` ids below vocab_size."""
    rng = random.Random(seed)
    return [Item(f"random-{i}", "", {"prompt_token_ids": rng.choices(range(vocab_size), k=length)}) for i in range(count)]
