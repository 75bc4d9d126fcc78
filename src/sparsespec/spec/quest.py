"""Quest (arXiv 2406.10774): pages of 16 keys, ranked at each step by the best that their channel-wise bounds allow.

A page's score is the sum over channels of max(q·min, q·max) of its keys, an upper bound of its logits. Pages are chosen
anew at every draft step, layer and KV head; the page being written is always seen, and the first two layers see all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsespec.attention.base import SparseRows
from sparsespec.spec.base import DraftPolicy, Selection, Verified

_PAGE = 16
_DENSE_LAYERS = 2


class Quest(DraftPolicy):
    """The budget counts tokens; whole pages are taken. Bounds of a request's full pages are kept while it runs."""

    name = "quest"
    selects = True
    reselects = True

    def select(self, verified: Verified) -> Selection:
        """Bounds of the pages that filled up; the tail begins with the page that is being written."""
        full = verified.tail // _PAGE
        bounds = None if verified.prompt else self.state.get(verified.slot)
        known = 0 if bounds is None else bounds.shape[2]
        if full > known:
            keys = verified.keys(known * _PAGE, full * _PAGE).unflatten(2, (-1, _PAGE))
            fresh = torch.stack((keys.amin(3), keys.amax(3)), 3)  # [layers, KV heads, pages, 2, D]
            bounds = fresh if bounds is None else torch.cat((bounds, fresh), 2)
        if bounds is None:
            bounds = verified.keys(0, 1)[:, :, None].expand(-1, -1, -1, 2, -1)[:, :, :0]
        self.state[verified.slot] = bounds
        most = min(-(-self.budget(verified.length) // _PAGE), full) * _PAGE
        count = torch.full((self.model.num_layers, self.model.num_kv_heads), most)
        count[:_DENSE_LAYERS] = full * _PAGE
        places = torch.arange(full * _PAGE).expand(*count.shape, -1)
        return Selection(places, count, full * _PAGE)

    def reselect(self, layer: int, q: Tensor, rows: SparseRows) -> tuple[Tensor, Tensor]:
        counts = rows.counts[rows.slots, layer]  # [n, KV heads]
        slots = rows.slots.tolist()
        pages = max(int(rows.tail.max()) // _PAGE, 1)
        scores = torch.full((len(slots), self.model.num_kv_heads, pages), -torch.inf, device=q.device)
        for i, slot in enumerate(slots):
            low, high = self.state[slot][layer].to(q.dtype).unbind(2)  # [KV heads, pages, D]
            bound = q[i].clamp(min=0) @ high.transpose(-1, -2) + q[i].clamp(max=0) @ low.transpose(-1, -2)
            scores[i, :, :low.shape[1]] = bound.mean(1)
        width = int(counts.max())
        best = scores.topk(width // _PAGE, -1).indices
        places = (best[..., None] * _PAGE + torch.arange(_PAGE, device=q.device)).flatten(-2)
        return rows.with_tail(places, counts)
