"""What a draft policy decides: where drafts come from, how much of the KV they see, and what it learns from verification.

A round is some drafts and one full verification. Drafts come from the model itself with sparse attention (a policy that
`selects`), from a cheap proposer (one that `proposes`), or from both: then the sparse pass checks what was proposed.
Whatever a policy does, the output stays the target's: drafts are only proposals. A new policy is one file and one line in
the registry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from sparsespec.attention.base import SparseRows
from sparsespec.config.model import ModelConfig
from sparsespec.config.speculative import SpeculativeConfig
from sparsespec.core.request import DraftTraits, Request

_ALL = 1 << 30  # more rows than any prompt has


@dataclass(frozen=True)
class Verified:
    """A full pass of a request that a selection is made from: a verification, or (`prompt`) the last chunk of a prefill.

    tail: position of its first scored row; entries from there on are always seen. length: committed tokens after it.
    rows: rows that were scored. accepted: how many of them stand before a rejected draft (the first row always does).
    scores: what `observe` made of each layer, stacked: [layers, KV heads, rows or 1, tail], None for policies without scores.
    keys: (start, end) → keys [layers, KV heads, end - start, head_dim] of these positions.
    """

    slot: int
    prompt: bool
    tail: int
    length: int
    rows: int
    accepted: int
    scores: Tensor | None
    keys: Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Selection:
    """positions [layers, KV heads, n] int64 below `tail`, of which the first counts [layers, KV heads] hold (None: all n).

    tail: first position that every draft sees; None: Verified.tail.
    """

    positions: Tensor
    counts: Tensor | None = None
    tail: int | None = None


class Draws(Protocol):
    """How a proposer that has a model of its own draws tokens: as the request samples, with the target's vocabulary."""

    def __call__(self, logits: Tensor, index: np.ndarray, place: int) -> Tensor:
        """Tokens [n] for the proposals' place `place` of requests `index` [n], from logits [n, vocab]; they are written too."""
        ...


@dataclass(frozen=True)
class ProposeContext:
    """Requests that want proposals, item by item.

    lengths: committed tokens. drafted: tokens buffered after them, already in `tokens` [slots, max_len] on the device.
    most [n]: how many may be proposed.
    """

    requests: Sequence[Request]
    slots: np.ndarray
    lengths: np.ndarray
    drafted: np.ndarray
    most: np.ndarray
    tokens: Tensor
    draw: Draws

    def at_most(self, most: int) -> ProposeContext:
        """The same, with no more than `most` tokens each."""
        return replace(self, most=np.minimum(self.most, most))

    def buffered(self, index: int) -> list[int]:
        """The tokens that request `index` has drafted in this round."""
        start, count = int(self.lengths[index]), int(self.drafted[index])
        return self.tokens[int(self.slots[index]), start:start + count].tolist() if count else []


@dataclass(frozen=True)
class Features:
    """Hidden states of committed rows, for proposers that read the target's: [feature_layers, N, hidden].

    Items lie one after the other, each a run of neighbouring positions of one request. slots, positions [N]: the rows; the
    token after each is in the token table.
    """

    hidden: Tensor
    slots: Tensor
    positions: Tensor


class DraftHead(Protocol):
    """A small model that drafts from hidden states of the target, with a KV cache of its own that the policy keeps.

    feature_layers: layers of the target whose inputs it reads, ascending.
    """

    feature_layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden states [N, hidden] from the target's [feature_layers, N, target hidden]."""
        ...

    def __call__(self, hidden: Tensor, tokens: Tensor, positions: Tensor,
                 attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """States [N, hidden] after positions [N], from the ones before and the tokens that follow them [N]; attend maps q
        [N, heads, D], k, v [N, KV heads, D] to [N, heads · D]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, target vocabulary] in float32; -inf for tokens that it does not know."""
        ...


class DraftPolicy:
    """See the module. Class attributes say what the policy needs of the engine."""

    name: ClassVar[str]
    selects: ClassVar[bool] = False  # drafts with sparse attention over what `select` gives
    proposes: ClassVar[bool] = False  # `propose` gives tokens without a pass of the target
    uses_scores: ClassVar[bool] = False  # every full pass hands its attention probabilities to `observe`
    reselects: ClassVar[bool] = False  # each draft step and layer asks `reselect` for its entries
    needs_head: bool = False  # the draft head that the engine loads from speculative_config.model goes to `bind`
    feature_layers: tuple[int, ...] = ()  # inputs of these layers of the target go to `absorb`; ascending

    def __init__(self, config: SpeculativeConfig, model: ModelConfig) -> None:
        self.config, self.model = config, model
        self.scale = 1.0  # of the budget; the adaptive mode turns it
        self.state: dict[int, Any] = {}  # by slot, what the policy knows of its request

    @property
    def drafts(self) -> bool:
        """False: every step is a plain decode."""
        return self.selects or self.proposes

    def bind(self, head: DraftHead) -> None:
        """Take the engine's draft head, before anything is drafted; only policies that need one are given it."""

    def traits(self, index: int) -> DraftTraits:
        """What the scheduler has to know of it, as the engine's policy number `index`."""
        rows = _ALL if self.feature_layers else self.score_rows(_ALL, True) if self.selects else 1
        return DraftTraits(index, self.config.num_speculative_tokens if self.drafts else 0, self.selects, self.proposes, rows)

    # -- selection -------------------------------------------------------------------------------------------------

    def base_budget(self, length: int) -> int:
        """Entries that a draft step sees besides the tail, at a context of `length` tokens, as configured."""
        return max(self.config.min_budget, math.ceil(self.config.sparse_attn_ratio * length))

    def budget(self, length: int) -> int:
        """The same, as scaled now."""
        return math.ceil(self.scale * self.base_budget(length))

    @property
    def averages(self) -> bool:
        """Whether `observe` is the mean over scored rows and the group, which a backend may have computed already."""
        return False

    def wants_scores(self, prompt: bool) -> bool:
        """Whether a full pass (`prompt`: the prompt's last) is to be scored."""
        return self.uses_scores

    def score_rows(self, rows: int, prompt: bool) -> int:
        """How many of a full pass's last rows are scored: all of a verification, and as many at the prompt's end."""
        return min(rows, self.config.num_speculative_tokens + 1)

    def kept_rows(self, rows: int) -> int:
        """Rows that stay apart in `scores` until acceptance is known, of `rows` scored ones; 1: they are averaged at once."""
        return 1

    def observe(self, probs: Tensor, out: Tensor) -> None:
        """Reduce one layer's probabilities [KV heads, group, rows, kv_len] into out [KV heads, kept rows, tail]."""
        raise NotImplementedError(f"{self.name} uses no scores")

    def select(self, verified: Verified) -> Selection:
        """What the next drafts see, at most `budget` entries of each layer and KV head."""
        raise NotImplementedError(f"{self.name} selects nothing")

    def reselect(self, layer: int, q: Tensor, rows: SparseRows) -> tuple[Tensor, Tensor]:
        """(entries [n, KV heads, w] int64 in the pool, valid) for draft rows with queries q [n, KV heads, group, D], scaled."""
        raise NotImplementedError(f"{self.name} selects once a round")

    # -- proposals -------------------------------------------------------------------------------------------------

    def propose(self, context: ProposeContext) -> list[list[int]] | np.ndarray:
        """Tokens for each request, certain ones (one-hot proposals); or, if drawn by `context.draw`, how many each [n]."""
        raise NotImplementedError(f"{self.name} proposes nothing")

    def absorb(self, features: Features, tokens: Tensor) -> None:
        """See the hidden states of rows that were just committed; tokens [slots, max_len]."""

    # -- state of a request, by slot ---------------------------------------------------------------------------------

    def leave(self, slot: int) -> None:
        """The slot's request is gone."""
        self.state.pop(slot, None)
