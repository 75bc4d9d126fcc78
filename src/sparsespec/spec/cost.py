"""What an iteration costs, from a few measurements, and what rounds of drafts gain (SparseSpec's speed-up model, generalised).

A round is some draft passes and one verification, each an iteration. With B requests spread evenly over the phases, an
iteration carries B / (passes + 1) verifications of k + 1 rows with full attention, and draft passes for all others. Sparse
drafts take k passes of one row; a proposer alone takes none; a proposer under the sparse pass takes fewer, of more rows.
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

    def full(self, items: float, rows: float, length: float) -> float:
        """Full attention of `items` items of `rows` query rows over `length` tokens each."""
        overhead, token, token_row = self.dense
        return self.layers * items * (overhead + length * (token + token_row * (rows - 1)))

    def step(self, rows: float, items: float, item_rows: float, length: float, draft_rows: float = 0.0, view: float = 0.0,
             scored: float = 0.0) -> float:
        """An iteration of `rows` rows: `items` items with full attention over `length` tokens, of `item_rows` rows each and
        `scored` of them scored, and `draft_rows` rows that see `view` entries."""
        out = self.products(rows) + self.full(items, item_rows, length) + self.layers * scored * length * self.select
        if draft_rows:
            overhead, entry = self.sparse
            out += self.layers * (overhead + draft_rows * view * entry)
        return out

    def iteration(self, batch: int, length: float, k: int, view: float, passes: float, pass_rows: float = 1.0) -> float:
        """Mean iteration of rounds that verify k drafts after `passes` draft passes of `pass_rows` rows, each of which sees
        `view` entries. k = 0 is plain decoding."""
        if k == 0:
            return self.step(batch, batch, 1, length)
        verifies = batch / (passes + 1)
        drafts = verifies * passes * pass_rows
        return self.step(verifies * (k + 1) + drafts, verifies, k + 1, length, drafts, view, verifies if passes else 0.0)


def expected_tokens(acceptance: Sequence[float], k: int) -> float:
    """Tokens of a round of k drafts: acceptance[j] is the chance of draft j given that those before it were accepted."""
    return 1.0 + float(np.cumprod(np.asarray(acceptance[:k], float)).sum())


def most_gain(weight_bytes: float, kv_bytes: float) -> float:
    """No sparse drafts can gain more over plain decoding: each pass reads the weights still, and at best no KV.

    weight_bytes, kv_bytes: what a plain iteration reads.
    """
    return 1.0 + kv_bytes / weight_bytes
