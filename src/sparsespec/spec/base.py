"""What a draft policy decides: how much of the KV a draft sees, which entries, and what it learns from verification.

A round is k sparse drafts and one full verification. Whatever a policy selects, the output stays the target's: drafts
are only proposals. A new policy is one file and one line in the registry.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparsespec.config.model import ModelConfig
from sparsespec.config.speculative import SpeculativeConfig


@dataclass(frozen=True)
class Verified:
    """A verification, or the last chunk of a prefill, that a selection is made from.

    tail: position of its first scored row; entries from there on are always seen. length: committed tokens after it.
    rows: rows that were scored. accepted: how many of them stand before a rejected draft (the first row always does).
    scores: what `observe` made of each layer, stacked: [layers, KV heads, rows or 1, tail], None for policies without scores.
    """

    tail: int
    length: int
    rows: int
    accepted: int
    scores: Tensor | None


class DraftPolicy(ABC):
    """See the module. Class attributes say what the policy needs of the engine."""

    name: ClassVar[str]
    drafts: ClassVar[bool] = True  # False: every step is a plain decode
    uses_scores: ClassVar[bool] = False  # verification hands its attention probabilities to `observe`

    def __init__(self, config: SpeculativeConfig, model: ModelConfig) -> None:
        self.config, self.model = config, model

    @property
    def keeps_rows(self) -> bool:
        """Whether scores stay apart by row until acceptance is known, so that `select` can weigh rejected rows."""
        return False

    def budget(self, length: int) -> int:
        """Entries that a draft step sees besides the tail, at a context of `length` tokens."""
        return max(self.config.min_budget, math.ceil(self.config.sparse_attn_ratio * length))

    def observe(self, probs: Tensor, out: Tensor) -> None:
        """Reduce one layer's probabilities [KV heads, group, rows, kv_len] into out [KV heads, rows or 1, tail]."""
        raise NotImplementedError(f"{self.name} uses no scores")

    @abstractmethod
    def select(self, verified: Verified) -> Tensor:
        """Positions [layers, KV heads, n] int64 below verified.tail that the next drafts see, n <= budget."""
