"""Compiles what a request's output must match. xgrammar does it, and is imported when the first such request comes.

A `Constraint` is what comes of it: the rules, shared by all completions of a request. What follows them through a text
is in constraint.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from sparsespec.core.errors import InvalidValueError, UnsupportedError
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.core.structured_outputs import StructuredOutputsParams
from sparsespec.sampling.json_schema import parse_schema
from sparsespec.sampling.trial import Bounds, try_grammar

if TYPE_CHECKING:
    import xgrammar

_CACHE_BYTES = 256 << 20
_MARKERS = 8
_TRIED = 1024
_ANY_OBJECT = '{"type": "object"}'


def load_xgrammar(params: SamplingParams) -> Any:
    """The library. Raises UnsupportedError, which names the extra that brings it."""
    try:
        import xgrammar
    except ImportError as e:
        name = "structured_outputs" if params.structured_outputs is not None else "thinking_token_budget"
        raise UnsupportedError(name, getattr(params, name), "xgrammar is not installed",
                               'Install it with pip install "sparsespec[structured]"') from e
    return xgrammar


class Vocabulary:
    """The bytes of each token, and what xgrammar is to know of them.

    Special tokens have no bytes in a grammar: they are left out of the text that a caller sees. texts: each token's bytes,
    those of special ones too, so that a marker is found which is one of them.
    """

    def __init__(self, xgr: Any, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        plain = xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self.size, self.eos = vocab_size, frozenset(eos_token_ids)
        self.texts: list[bytes] = list(plain.decoded_vocab)
        self.special = self.eos | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        words = [b"" if i in self.special else text for i, text in enumerate(self.texts)]
        self.info = xgr.TokenizerInfo(words, xgr.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=sorted(eos_token_ids),
                                      add_prefix_space=plain.add_prefix_space)


@dataclass(frozen=True)
class Marker:
    """The text that ends reasoning, as bytes, and the tokens that write it.

    endings: for each number of its bytes that are matched already, the tokens that hold more than the rest of it, and what
    they have after it.
    """

    text: bytes
    ids: tuple[int, ...]
    endings: tuple[list[tuple[int, bytes]], ...]

    @classmethod
    def build(cls, text: bytes, ids: Sequence[int], words: Sequence[bytes]) -> Marker:
        """words: the bytes of each token."""
        endings: list[list[tuple[int, bytes]]] = [[] for _ in text]
        for token, word in enumerate(words):
            if text[-1] in word[:-1]:
                for before, found in enumerate(endings):
                    rest = match_marker(text, before, word)[1]
                    if rest:
                        found.append((token, rest))
        return cls(text, tuple(ids), tuple(endings))


def match_marker(marker: bytes, before: int, word: bytes) -> tuple[int, bytes | None]:
    """After `before` of the marker's bytes comes a token's word: (bytes matched now, None), or (0, what follows the marker)."""
    if not before and marker[0] not in word:
        return 0, None
    seen = marker[:before] + word
    end = seen.find(marker)
    if end >= 0:
        return 0, seen[end + len(marker):]
    longest = min(len(seen), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if seen.endswith(marker[:n])), 0), None


@dataclass(frozen=True, eq=False)
class Constraint:
    """What the output tokens of a request must obey. grammar None: nothing after reasoning. marker None: no reasoning.

    budget: tokens of reasoning after which the marker is forced.
    """

    vocabulary: Vocabulary
    grammar: xgrammar.CompiledGrammar | None
    marker: Marker | None
    budget: int | None

    def end_ids(self, stop_token_ids: Sequence[int]) -> frozenset[int]:
        """What may end the output where the grammar allows it: EOS, and stop ids that are not text.

        Other stop ids are tokens of the text, which end it where the grammar has them.
        """
        special = self.vocabulary.special
        return self.vocabulary.eos | {i for i in stop_token_ids if i in special}


class ConstraintCompiler:
    """Makes constraints for one tokenizer. Thread-safe; compiled grammars are kept, up to 256 MiB.

    A grammar that is new is tried in a child process first (see trial.py), for some CPU seconds at most. A server can call
    `compile` in a thread of its own before it hands a request to the engine, which then finds the grammar compiled.
    """

    bounds = Bounds()

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer, self.vocab_size, self.eos = tokenizer, vocab_size, sorted(eos_token_ids)
        self._lock = Lock()
        self._vocabulary: Vocabulary | None = None
        self._compiler: Any = None
        self._markers: dict[str, Marker] = {}
        self._tried: dict[tuple[str, str, bool], str | None] = {}

    def compile(self, params: SamplingParams) -> Constraint | None:
        """None if the request asks for none. Raises InvalidValueError or UnsupportedError."""
        wanted = params.structured_outputs
        if wanted is None and params.thinking_token_budget is None:
            return None
        name = "structured_outputs" if wanted is not None else "thinking_token_budget"
        if self.tokenizer is None:
            raise UnsupportedError(name, getattr(params, name), "needs a tokenizer", "Load one, without skip_tokenizer_init")
        xgr = load_xgrammar(params)
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(xgr, self.tokenizer, self.vocab_size, self.eos)
                self._compiler = xgr.GrammarCompiler(self._vocabulary.info, max_threads=1,
                                                     cache_limit_bytes=_CACHE_BYTES)
            vocabulary = self._vocabulary
            marker = None if params.reasoning_end_str is None else self._marker(vocabulary, params.reasoning_end_str)
        grammar = None
        if wanted is not None:
            if not self.eos:
                raise UnsupportedError(name, wanted, "the model has no EOS token, so the output could not end", "Leave it out")
            grammar = self._grammar(vocabulary, StructuredOutputsParams.from_any(wanted))
        return Constraint(vocabulary, grammar, marker, params.thinking_token_budget)

    def _marker(self, vocabulary: Vocabulary, text: str) -> Marker:
        """Raises InvalidValueError. The last few are kept: finding a marker's endings is a pass over the vocabulary."""
        if text not in self._markers:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
            if b"".join(vocabulary.texts[i] for i in ids) != text.encode():
                raise InvalidValueError("reasoning_end_str", text, "the tokenizer can't write it", "Give the model's own marker")
            if len(self._markers) >= _MARKERS:
                self._markers.clear()
            self._markers[text] = Marker.build(text.encode(), ids, vocabulary.texts)
        return self._markers[text]

    def _grammar(self, vocabulary: Vocabulary, wanted: StructuredOutputsParams) -> xgrammar.CompiledGrammar:
        compile_it = self._compilation(wanted)
        key = (wanted.kind, wanted.source, wanted.disable_any_whitespace)
        if key not in self._tried:
            verdict = try_grammar(compile_it, vocabulary.size, self.eos, self.bounds)
            if len(self._tried) >= _TRIED:
                self._tried.clear()
            self._tried[key] = verdict
        problem = self._tried[key]
        if problem is not None:  # xgrammar's messages begin with a file and a line of its own
            problem = problem.strip().rsplit("] ", 1)[-1].split(": ", 1)[-1]
            raise InvalidValueError(wanted.field, getattr(wanted, wanted.kind), f"can't be used: {problem}",
                                    "Correct or simplify it")
        return compile_it()

    def _compilation(self, wanted: StructuredOutputsParams) -> Callable[[], xgrammar.CompiledGrammar]:
        """The call that compiles it."""
        kind, source, compiler = wanted.kind, wanted.source, self._compiler
        if kind in ("json", "json_object"):
            schema = _ANY_OBJECT if kind == "json_object" else json.dumps(parse_schema(source), ensure_ascii=False)
            return lambda: compiler.compile_json_schema(schema, any_whitespace=not wanted.disable_any_whitespace)
        if kind == "regex":
            return lambda: compiler.compile_regex(source)
        if kind == "choice":
            source = "root ::= " + " | ".join(json.dumps(c, ensure_ascii=False) for c in wanted.choice or ())
        return lambda: compiler.compile_grammar(source)
