"""Batch-invariant attention: a row's result depends on its own sequence alone, bit for bit.

Every row is its own product of fixed shape over chunks of keys that start at position 0, and chunks are summed in
order: neither the batch, the number of rows nor the alignment of verification can change a bit. Drafts need none of
this, since they never reach the output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsespec.attention.base import AttentionBatch, DenseItem
from sparsespec.attention.torch_ref import TorchBackend

_CHUNK = 128  # keys of one product
_ROWS = 32  # rows computed together, which bounds memory and changes nothing else


class DeterministicBackend(TorchBackend):
    """See the module."""

    name = "torch_deterministic"

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self._sliced, self._gathered = batch.dense, []

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, item: DenseItem) -> tuple[Tensor, Tensor]:
        rows, length = q.shape[2], keys.shape[1]
        pad = -length % _CHUNK
        keys = F.pad(keys, (0, 0, 0, pad)).unflatten(1, (-1, _CHUNK))  # [H, C, chunk, D]
        values = F.pad(values, (0, 0, 0, pad)).unflatten(1, (-1, _CHUNK))
        transposed = keys.transpose(-1, -2).contiguous()  # else one row takes another kernel than several
        outputs, kept = [], []
        for first in range(0, rows, _ROWS):
            block = q[:, :, first:first + _ROWS].permute(2, 0, 1, 3).unsqueeze(2)  # [r, H, 1, G, D]
            logits = (block @ transposed).transpose(2, 3).flatten(3)  # [r, H, G, C · chunk]
            last = torch.arange(length - rows + first, length - rows + first + len(block), device=q.device)
            hidden = torch.arange(length + pad, device=q.device) > last[:, None, None, None]
            probs = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1)
            chunks = probs.unflatten(3, (-1, _CHUNK)).transpose(2, 3) @ values  # [r, H, C, G, D]
            total = torch.zeros_like(chunks[:, :, 0])
            for chunk in chunks.unbind(2):
                total = total + chunk
            outputs.append(total.permute(1, 2, 0, 3))
            kept.append(probs.permute(1, 2, 0, 3)[..., :length])
        return torch.cat(outputs, 2), torch.cat(kept, 2)[:, :, rows - item.score_rows:]
