"""Per-slot sampling settings as device tensors, so that a step's rows gather what they need in one operation.

A feature that no seated request uses costs nothing: `uses(feature)` is a look at a Python set.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from sparsespec.core.errors import InvalidValueError
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.sampling.constraint import Constraints
from sparsespec.sampling.grammar import Constraint

NEG_INF = float("-inf")


class Feature(Enum):
    """What a request may use. RANDOM: temperature above 0. COUPLED, REJECTION: how its random tokens are drawn."""

    RANDOM = auto()
    COUPLED = auto()
    REJECTION = auto()
    TOP_K = auto()
    TOP_P = auto()
    MIN_P = auto()
    STATIC = auto()
    MIN_TOKENS = auto()
    BAD_WORDS = auto()
    REPETITION = auto()
    FREQUENCY = auto()
    CONSTRAINT = auto()


class BadWords:
    """One slot's banned sequences. prefixes [W, L-1], right-aligned, -1 where a word is shorter; last [W]: the id to ban."""

    def __init__(self, words: Sequence[Sequence[int]], device: torch.device) -> None:
        longest = max(len(w) for w in words)
        rows = [[-1] * (longest - len(w)) + list(w) for w in words]
        table = torch.tensor(rows, dtype=torch.int64, device=device)
        self.prefixes, self.last = table[:, :-1], table[:, -1]


def _check_ids(field: str, value: object, ids: Collection[int], vocab_size: int) -> None:
    wrong = sorted(i for i in ids if not 0 <= i < vocab_size)
    if wrong:
        raise InvalidValueError(field, value, f"token id {wrong[0]} is outside the vocabulary of {vocab_size}",
                                f"Use ids from 0 to {vocab_size - 1}")


def validate(params: SamplingParams, vocab_size: int, stop_ids: Collection[int] = ()) -> None:
    """Check at admission what needs the vocabulary. stop_ids: EOS and other ids that min_tokens suppresses.

    Raises InvalidValueError for ids outside the vocabulary, or when min_tokens forbids all that is allowed.
    """
    _check_ids("logit_bias", params.logit_bias, params.logit_bias or {}, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids, params.allowed_token_ids or [], vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, params.stop_token_ids or [], vocab_size)
    if params.min_tokens and params.allowed_token_ids is not None:
        suppressed = {*stop_ids, *(params.stop_token_ids or [])}
        if suppressed.issuperset(params.allowed_token_ids):
            raise InvalidValueError("allowed_token_ids", params.allowed_token_ids,
                                    f"all of them end the output, which min_tokens={params.min_tokens} forbids",
                                    "Allow another id, or set min_tokens to 0")


class SamplingTable:
    """Settings of up to max_num_seqs seated requests. Unset slots are greedy and use nothing.

    Per-slot tensors [max_num_seqs]: temperature (1 where greedy), top_p, min_p, repetition, frequency, presence (float32);
    top_k (vocab_size where off), seed, prompt_len, min_tokens, static_row (int64); random, coupled (bool).
    stop_ids [max_num_seqs, S]: what min_tokens suppresses, -1 where unused. static [rows, V]: per-token additive terms of
    logit_bias and allowed_token_ids (-inf elsewhere), for the slots whose static_row is not -1.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str) -> None:
        self.max_num_seqs, self.vocab_size, self.device = max_num_seqs, vocab_size, torch.device(device)
        self._unset_reals = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
        self._unset_ints = torch.tensor([vocab_size, 0, 0, 0, -1, 0, 0])
        self._reals = self._unset_reals.to(self.device).repeat(max_num_seqs, 1)
        self._ints = self._unset_ints.to(self.device).repeat(max_num_seqs, 1)
        self.temperature, self.top_p, self.min_p, self.repetition, self.frequency, self.presence = self._reals.unbind(1)
        (self.top_k, self.seed, self.prompt_len, self.min_tokens, self.static_row, self._random,
         self._coupled) = self._ints.unbind(1)
        self.stop_ids = torch.full((max_num_seqs, 1), -1, dtype=torch.int64, device=self.device)
        self.static = torch.zeros(0, vocab_size, device=self.device)
        self.bad_words: dict[int, BadWords] = {}
        self.constraints = Constraints()
        self._seated: set[int] = set()
        self._users: dict[Feature, set[int]] = {feature: set() for feature in Feature}
        self._top_ks: dict[int, int] = {}
        self._static_rows: dict[int, int] = {}

    def uses(self, feature: Feature) -> bool:
        """Whether any seated request uses it."""
        return bool(self._users[feature])

    def all_use(self, feature: Feature) -> bool:
        """Whether every seated request uses it."""
        return len(self._users[feature]) == len(self._seated)

    @property
    def max_top_k(self) -> int:
        """The largest top_k that is in use, 0 if none is."""
        return max(self._top_ks.values(), default=0)

    def random(self, slots: Tensor) -> Tensor:
        """bool [N]: the slot is not greedy."""
        return self._random[slots] != 0

    def coupled(self, slots: Tensor) -> Tensor:
        """bool [N]: the slot draws with noise that depends on its seed and the position alone."""
        return self._coupled[slots] != 0

    def set(self, slot: int, params: SamplingParams, *, prompt_len: int, seed: int, coupled: bool,
            eos_token_ids: Sequence[int], bad_word_ids: list[list[int]], constraint: Constraint | None = None) -> None:
        """Seat a request's settings, replacing the slot's earlier ones.

        eos_token_ids: ids that end the output besides params.stop_token_ids. bad_word_ids: token sequences that must not
        be completed. coupled: the seed is the user's own. constraint: of params.structured_outputs and the like, compiled.
        Raises as `validate` does; the slot is then as before.
        """
        validate(params, self.vocab_size, eos_token_ids)
        _check_ids("eos_token_ids", eos_token_ids, eos_token_ids, self.vocab_size)
        for word in bad_word_ids:
            if not word:
                raise InvalidValueError("bad_words", params.bad_words, "holds a word without tokens", "Leave that word out")
            _check_ids("bad_words", params.bad_words, word, self.vocab_size)
        self.clear(slot)
        self._seated.add(slot)
        p = params
        top_k = p.top_k if 0 < p.top_k < self.vocab_size else 0
        self._mark(slot, p, coupled, top_k, bool(bad_word_ids))
        self._reals[slot] = torch.tensor([1.0 if p.greedy else p.temperature, p.top_p, p.min_p, p.repetition_penalty,
                                          p.frequency_penalty, p.presence_penalty])
        self._ints[slot] = torch.tensor([top_k or self.vocab_size, seed, prompt_len, p.min_tokens, self._set_static(slot, p),
                                         int(not p.greedy), int(coupled)])
        if p.min_tokens:
            self._set_stop_ids(slot, sorted({*eos_token_ids, *(p.stop_token_ids or [])}))
        if bad_word_ids:
            self.bad_words[slot] = BadWords(bad_word_ids, self.device)
        if constraint is not None:
            self._users[Feature.CONSTRAINT].add(slot)
            self.constraints.seat(slot, constraint, prompt_len, constraint.end_ids(p.stop_token_ids or ()))

    def clear(self, slot: int) -> None:
        """Forget a slot's settings; a slot that is not seated is left as it is."""
        if slot not in self._seated:
            return
        self._seated.discard(slot)
        for users in self._users.values():
            users.discard(slot)
        self._top_ks.pop(slot, None)
        self._static_rows.pop(slot, None)
        self.bad_words.pop(slot, None)
        self.constraints.clear(slot)
        self._reals[slot] = self._unset_reals.to(self.device)
        self._ints[slot] = self._unset_ints.to(self.device)
        self.stop_ids[slot] = -1

    def _mark(self, slot: int, p: SamplingParams, coupled: bool, top_k: int, bad_words: bool) -> None:
        used = {Feature.STATIC: p.logit_bias is not None or p.allowed_token_ids is not None,
                Feature.MIN_TOKENS: p.min_tokens > 0, Feature.BAD_WORDS: bad_words,
                Feature.REPETITION: p.repetition_penalty != 1,
                Feature.FREQUENCY: p.frequency_penalty != 0 or p.presence_penalty != 0}
        if not p.greedy:  # truncation cannot change the most likely token
            used |= {Feature.RANDOM: True, Feature.COUPLED: coupled, Feature.REJECTION: not coupled, Feature.TOP_K: top_k > 0,
                     Feature.TOP_P: p.top_p < 1, Feature.MIN_P: p.min_p > 0}
        for feature, on in used.items():
            if on:
                self._users[feature].add(slot)
        if used.get(Feature.TOP_K):
            self._top_ks[slot] = top_k

    def _set_static(self, slot: int, p: SamplingParams) -> int:
        """Fill a row of `static` for the slot; gives its index, or -1 if the request needs none."""
        if p.logit_bias is None and p.allowed_token_ids is None:
            return -1
        row = torch.zeros(self.vocab_size)
        if p.allowed_token_ids is not None:
            row.fill_(NEG_INF)
            row[torch.tensor(p.allowed_token_ids)] = 0.0
        if p.logit_bias:
            row[torch.tensor(list(p.logit_bias))] += torch.tensor(list(p.logit_bias.values()))
        taken = set(self._static_rows.values())
        index = next(i for i in range(self.max_num_seqs) if i not in taken)
        if index >= len(self.static):
            more = min(max(4, len(self.static)), self.max_num_seqs - len(self.static))
            self.static = torch.cat((self.static, torch.zeros(more, self.vocab_size, device=self.device)))
        self.static[index] = row.to(self.device)
        self._static_rows[slot] = index
        return index

    def _set_stop_ids(self, slot: int, ids: list[int]) -> None:
        missing = len(ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = torch.nn.functional.pad(self.stop_ids, (0, missing), value=-1)
        self.stop_ids[slot, :len(ids)] = torch.tensor(ids, dtype=torch.int64, device=self.device)
