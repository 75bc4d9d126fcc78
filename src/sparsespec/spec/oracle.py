"""The oracle: full attention scores at every draft step, of which the best entries are kept. The ceiling of a budget.

It reads all keys in each draft step, so it gains nothing: it shows what a perfect selection would accept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsespec.attention.base import SparseRows
from sparsespec.spec.base import DraftPolicy, Selection, Verified


class Oracle(DraftPolicy):
    """The budget's best entries of each layer, KV head and draft step, by attention averaged over the query group."""

    name = "oracle"
    selects = True
    reselects = True

    def select(self, verified: Verified) -> Selection:
        """The number of entries; which, each step decides."""
        most = min(self.budget(verified.length), verified.tail)
        return Selection(torch.arange(most).expand(self.model.num_layers, self.model.num_kv_heads, -1))

    def reselect(self, layer: int, q: Tensor, rows: SparseRows) -> tuple[Tensor, Tensor]:
        places = torch.arange(int(rows.last.max()) + 1, device=q.device)
        entries = rows.entries(torch.minimum(places, rows.last[:, None]))  # [n, L]
        keys = rows.pool.k(layer)[:, entries].transpose(0, 1)  # [n, KV heads, L, D]
        logits = (q @ keys.transpose(-1, -2)).masked_fill((places > rows.last[:, None])[:, None, None], -torch.inf)
        scores = logits.softmax(-1).mean(2).masked_fill((places >= rows.tail[:, None])[:, None], -1.0)
        return rows.with_tail(scores.topk(min(rows.width, len(places)), -1).indices, rows.counts[rows.slots, layer])
