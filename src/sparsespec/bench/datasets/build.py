"""From a dataset to prompts of one model: through its chat template, or cut to a number of its tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsespec.bench.datasets.formats import Question
from sparsespec.bench.datasets.traces import Trace
from sparsespec.core.errors import InvalidValueError

if TYPE_CHECKING:
    from sparsespec.llm import LLM

TEXT_LENGTH = 2048  # tokens of a text or document where none are asked for
_CHARACTERS = 6  # characters a token at most, at first; doubled while a text comes out too short
_ABOUT = "Here is a part of a manual:\n\n"
_TASK = "\n\nSummarise this part of the manual: list its main rules one by one, with a short example for each."


@dataclass(frozen=True)
class Item:
    """One prompt. name: for reports. question: as a person reads it, "" for ids. prompt: as LLM.generate takes it.

    max_tokens: output tokens that it gets exactly, None for the benchmark's own limit.
    """

    name: str
    question: str
    prompt: dict[str, Any]
    max_tokens: int | None = None


@dataclass(frozen=True)
class Dataset:
    """kind: chat (questions through the chat template), text (to continue), document (to summarise), ids, or trace."""

    name: str
    kind: str
    entries: list[Question]
    trace: Trace | None = None


def build(dataset: Dataset, llm: LLM, count: int, length: int | None = None, *, seed: int = 0, scale: float = 1.0) -> list[Item]:
    """The first `count` prompts. Raises InvalidValueError where the dataset has fewer, or a text is too short.

    length: tokens of a text, document or random prompt; None: 2048. Questions keep their own. scale: of a trace's lengths.
    """
    vocab = llm.loaded.config.vocab_size
    if dataset.trace is not None:
        sizes = dataset.trace.lengths(count, seed, scale)
        prompts = random_ids(vocab, count, max(n for n, _ in sizes), seed)
        return [Item(p.name, "", {"prompt_token_ids": p.prompt["prompt_token_ids"][:n]}, out)
                for p, (n, out) in zip(prompts, sizes, strict=True)]
    if dataset.kind == "ids":
        return random_ids(vocab, count, length or TEXT_LENGTH, seed)
    if count > len(dataset.entries):
        raise InvalidValueError("num_prompts", count, f"the {dataset.name} set has {len(dataset.entries)} problems",
                                f"Give at most {len(dataset.entries)}, or use --dataset random")
    chosen = dataset.entries[:count]
    if dataset.kind == "chat":
        return [_ask(llm, q.name, q.text, q.text) for q in chosen]
    if llm.get_tokenizer() is None:
        raise InvalidValueError("dataset", dataset.name, "text needs a tokenizer", "Use random, or load a tokenizer")
    if dataset.kind == "text":
        return [Item(q.name, "", {"prompt_token_ids": _ids(llm, q, length or TEXT_LENGTH)}) for q in chosen]
    return [_document(llm, q, length or TEXT_LENGTH) for q in chosen]


def _ask(llm: LLM, name: str, shown: str, text: str) -> Item:
    template = bool(getattr(llm.get_tokenizer(), "chat_template", None))
    return Item(name, shown, llm.apply_chat_template([{"role": "user", "content": text}]) if template else {"prompt": text})


def _ids(llm: LLM, question: Question, length: int) -> list[int]:
    """The first `length` tokens of a text."""
    size = length * _CHARACTERS
    while True:
        ids: list[int] = list(llm.get_tokenizer()(question.text[:size])["input_ids"])
        if len(ids) >= length:
            return ids[:length]
        if size >= len(question.text):
            raise InvalidValueError("context", length, f"{question.name} has only {len(ids)} tokens", f"Give at most {len(ids)}")
        size *= 2


def _document(llm: LLM, question: Question, length: int) -> Item:
    """A question about a document, cut so that the prompt has about `length` tokens and never more."""
    tokenizer = llm.get_tokenizer()
    around = len(llm.engine.admission.tokenize(_ask(llm, "", "", _ABOUT + _TASK).prompt)[1])
    if length <= around:
        raise InvalidValueError("context", length, f"the question alone takes {around} tokens", f"Give more than {around}")
    keep = length - around
    while True:
        part = tokenizer.decode(_ids(llm, question, keep), skip_special_tokens=True)
        item = _ask(llm, question.name, question.name, _ABOUT + part + _TASK)
        over = len(llm.engine.admission.tokenize(item.prompt)[1]) - length
        if over <= 0:
            return item
        keep -= over


def random_ids(vocab_size: int, count: int, length: int, seed: int) -> list[Item]:
    """`count` prompts of `length` ids below vocab_size."""
    rng = random.Random(seed)
    return [Item(f"random-{i}", "", {"prompt_token_ids": rng.choices(range(vocab_size), k=length)}) for i in range(count)]
