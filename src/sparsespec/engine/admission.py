"""Turns what a caller asks into requests, or says clearly why not. Nothing here touches running requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsespec.core.errors import CapacityError, ContextLengthError, InvalidValueError, UnsupportedError
from sparsespec.core.request import DraftTraits, Request
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.sampling.grammar import ConstraintCompiler
from sparsespec.sampling.rng import request_seed
from sparsespec.sampling.table import validate

Prompt = str | Sequence[int] | dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """What a request has to fit into."""

    max_model_len: int
    kv_tokens: int
    vocab_size: int


class Admission:
    """Checks and builds requests. Seeds of requests without one come from the engine's seed and a running number."""

    def __init__(self, limits: Limits, tokenizer: Any | None, eos_token_ids: Sequence[int], seed: int) -> None:
        self.limits, self.tokenizer, self.eos = limits, tokenizer, frozenset(eos_token_ids)
        self.constraints = ConstraintCompiler(tokenizer, limits.vocab_size, eos_token_ids)
        self.seed, self._count = seed, 0

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, ids) of a prompt. Raises InvalidValueError."""
        text: str | None = None
        if isinstance(prompt, dict):
            if set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"} or not prompt:
                raise InvalidValueError("prompt", prompt, "unknown or missing keys",
                                        'Give {"prompt_token_ids": [...]} or {"prompt": "..."}, and "cache_salt" if you like')
            text = prompt.get("prompt")
            prompt = prompt.get("prompt_token_ids") or text or ""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidValueError("prompt", prompt, "text needs a tokenizer", "Give token ids, or load a tokenizer")
            text, ids = prompt, list(self.tokenizer(prompt)["input_ids"])
        else:
            ids = list(prompt)
            if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < self.limits.vocab_size for i in ids):
                raise InvalidValueError("prompt_token_ids", ids, "holds something that is not a token id",
                                        f"Give integers from 0 to {self.limits.vocab_size - 1}")
        if not ids:
            raise InvalidValueError("prompt", prompt, "empty", "Give at least one token")
        return text, ids

    def cache_salt(self, prompt: Prompt) -> str | None:
        """Whom the prompt's prefix may be shared with: those who give the same. Raises InvalidValueError."""
        salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise InvalidValueError("cache_salt", salt, "not a non-empty string", "Give a string, or leave it out")
        return salt

    def build(self, request_id: str, ids: list[int], params: SamplingParams, traits: DraftTraits) -> list[Request]:
        """The `n` requests of a prompt. Raises ContextLengthError, CapacityError, InvalidValueError or UnsupportedError."""
        stop = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.eos)
        validate(params, self.limits.vocab_size, stop)
        if params.stop_strings and self.tokenizer is None:
            raise UnsupportedError("stop", params.stop, "stop strings need a tokenizer", "Use stop_token_ids")
        if params.bad_words and self.tokenizer is None:
            raise UnsupportedError("bad_words", params.bad_words, "bad words need a tokenizer", "Use logit_bias")
        limits = self.limits
        if params.min_tokens > limits.max_model_len:
            raise ContextLengthError("min_tokens", params.min_tokens, f"more than max_model_len={limits.max_model_len}", "Lower it")
        if len(ids) >= limits.max_model_len:
            raise ContextLengthError("prompt", f"{len(ids)} tokens", f"longer than max_model_len={limits.max_model_len} less one",
                                     "Shorten the prompt or raise max_model_len")
        limit = limits.max_model_len if params.max_tokens is None else min(len(ids) + params.max_tokens, limits.max_model_len)
        if limit > limits.kv_tokens:
            if params.max_tokens is not None or len(ids) >= limits.kv_tokens:
                raise CapacityError("max_tokens", params.max_tokens,
                                    f"{len(ids)} prompt tokens and these can never fit the KV cache of {limits.kv_tokens} tokens",
                                    "Lower max_tokens or raise kv_cache_tokens")
            limit = limits.kv_tokens
        bad_words, constraint = self._bad_words(params), self.constraints.compile(params)
        requests = []
        for index in range(params.n):
            self._count += 1
            seed = request_seed(self.seed, self._count) if params.seed is None else _int64(params.seed + index)
            name = request_id if params.n == 1 else f"{request_id}#{index}"
            requests.append(Request(name, ids, params, seed, params.seed is not None, limit, stop, self.eos, bad_words,
                                    constraint, traits=traits))
        return requests

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it is written, and as it continues a text."""
        out = []
        for word in params.bad_words or []:
            for text in (word, " " + word.lstrip()):
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] if self.tokenizer else []
                if ids and ids not in out:
                    out.append(list(ids))
        return out


def _int64(value: int) -> int:
    """Two's complement: the seeds after the largest one are the smallest ones."""
    return (value + 2**63) % 2**64 - 2**63
