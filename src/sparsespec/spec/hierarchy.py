"""Three levels: a cheap proposer, the sparse pass that checks its tokens, the full pass that verifies what was kept.

SparseSpec's discussion sketches it: the sparse self-draft confirms several proposed tokens at once, so that a round needs
fewer passes over the weights. The sparse pass accepts, replaces and extends exactly as a verification would, so what it
buffers has its own distribution, and the full verification is as lossless as without a proposer. TriForce (arXiv
2404.11912) is the same with a sliding window in the middle; unlike its public code, the middle level here samples the
true residual.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from sparsespec.config.model import ModelConfig
from sparsespec.config.speculative import SpeculativeConfig
from sparsespec.spec.base import DraftHead, DraftPolicy, Features, ProposeContext, Selection, Verified


class Hierarchy(DraftPolicy):
    """`middle` selects for the sparse pass, `proposer` gives it at most num_proposed_tokens to check."""

    name = "hierarchy"
    selects = True
    proposes = True

    def __init__(self, config: SpeculativeConfig, model: ModelConfig, middle: Callable[..., DraftPolicy],
                 proposer: Callable[..., DraftPolicy]) -> None:
        super().__init__(config, model)
        self.middle, self.proposer = middle(config, model), proposer(config, model)
        self.needs_head = self.proposer.needs_head

    def bind(self, head: DraftHead) -> None:
        self.proposer.bind(head)
        self.feature_layers = self.proposer.feature_layers

    def wants_scores(self, prompt: bool) -> bool:
        return self.middle.wants_scores(prompt)

    def base_budget(self, length: int) -> int:
        return self.middle.base_budget(length)

    def score_rows(self, rows: int, prompt: bool) -> int:
        return self.middle.score_rows(rows, prompt)

    def kept_rows(self, rows: int) -> int:
        return self.middle.kept_rows(rows)

    def observe(self, probs: Tensor, out: Tensor) -> None:
        self.middle.observe(probs, out)

    def select(self, verified: Verified) -> Selection:
        self.middle.scale = self.scale
        return self.middle.select(verified)

    def propose(self, context: ProposeContext) -> list[list[int]] | np.ndarray:
        return self.proposer.propose(context.at_most(self.config.num_proposed_tokens))

    def absorb(self, features: Features, tokens: Tensor) -> None:
        self.proposer.absorb(features, tokens)

    def leave(self, slot: int) -> None:
        self.middle.leave(slot)
        self.proposer.leave(slot)
