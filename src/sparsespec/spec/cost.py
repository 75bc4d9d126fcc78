"""What an iteration costs, from a few measurements, and what a round of k drafts gains (SparseSpec's speed-up model).

With B requests of which each iteration verifies B/(k+1), an iteration carries (2k+1)/(k+1)·B rows of matrix products,
full attention over B/(k+1) requests and sparse attention over B·k/(k+1), and gives B/(k+1)·(1 + accepted) tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepCosts:
    """Seconds of one layer's parts, times `layers`, and of the output head.

    rows, layer, head: a curve over row counts. dense: (overhead an item, a KV token, a KV token and query row more);
    sparse: (overhead, a row and entry); select: a scored KV token.
    """

    layers: int
    rows: tuple[int, ...]
    layer: tuple[float, ...]
    head: tuple[float, ...]
    dense: tuple[float, float, float]
    sparse: tuple[float, float]
    select: float

    def products(self, rows: float) -> float:
        """Matrix products, norms and the rest over all layers, and the head, for `rows` rows."""
        beyond = max(1.0, rows / self.rows[-1])  # past the curve, time grows with the rows
        return float(np.interp(rows, self.rows, self.layer) * self.layers + np.interp(rows, self.rows, self.head)) * beyond

    def full(self, items: float, rows: int, length: float) -> float:
        """Full attention of `items` items of `rows` query rows over `length` tokens each."""
        overhead, token, token_row = self.dense
        return self.layers * items * (overhead + length * (token + token_row * (rows - 1)))

    def iteration(self, batch: int, length: float, k: int, view: float) -> float:
        """Mean iteration at k drafts a round; `view`: entries that a draft sees. k = 0 is plain decoding."""
        if k == 0:
            return self.products(batch) + self.full(batch, 1, length)
        verifies, drafts = batch / (k + 1), batch * k / (k + 1)
        overhead, entry = self.sparse
        return (self.products(verifies * (k + 1) + drafts) + self.full(verifies, k + 1, length)
                + self.layers * (overhead + drafts * view * entry + verifies * length * self.select))


def expected_tokens(acceptance: Sequence[float], k: int) -> float:
    """Tokens of a round of k drafts: acceptance[j] is the chance of draft j given that those before it were accepted."""
    return 1.0 + float(np.cumprod(np.asarray(acceptance[:k], float)).sum())


def gain(costs: StepCosts, batch: int, length: float, k: int, view: float, tokens: float) -> float:
    """Speed-up over plain decoding of rounds of k drafts that give `tokens` tokens."""
    return tokens / (k + 1) * costs.iteration(batch, length, 0, view) / costs.iteration(batch, length, k, view)
