"""Dense layers: fused weights, packed once for the CPU, and a batch-invariant form.

A matrix product over few rows is bound by reading the weight. oneDNN's packed layout reads it about three times as
fast as the plain one on a CPU, so `finalize` packs each weight and drops the plain copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TILE = 16  # rows of one product in deterministic mode: a row's result then depends on that row alone


def _can_pack(weight: Tensor) -> bool:
    return (weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
            and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"))


class Linear(nn.Module):
    """y = x W^T + b with x [N, in], W [out, in]. `parts` are the sizes of fused outputs, for `part`."""

    bias: Tensor | None

    def __init__(self, in_features: int, parts: int | Sequence[int], *, bias: bool, dtype: torch.dtype,
                 device: torch.device, deterministic: bool) -> None:
        super().__init__()
        self.parts = (parts,) if isinstance(parts, int) else tuple(parts)
        out = sum(self.parts)
        self.shape, self.dtype, self.device = (out, in_features), dtype, device
        self.weight: Tensor | None = torch.empty(self.shape, dtype=dtype, device=device)
        self.bias = torch.empty(out, dtype=dtype, device=device) if bias else None
        self.deterministic = deterministic
        self._packed: Tensor | None = None

    def part(self, index: int, name: str = "weight") -> Tensor:
        """View of one fused output's weight or bias, for the loader to fill."""
        whole: Tensor = getattr(self, name)
        return whole.split(self.parts)[index]

    def finalize(self, *, keep: bool = False) -> None:
        """Pack the weight where that pays; the plain copy goes unless `keep`."""
        if self.weight is not None and _can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, TILE)
            if not keep:
                self.weight = None

    def reopen(self) -> None:
        """Undo `finalize`, so that the loader can fill the weight again; its values are unset."""
        self._packed = None
        if self.weight is None:
            self.weight = torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def _product(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return out
        if self.weight is None:
            raise RuntimeError("Linear has neither a plain nor a packed weight")
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.deterministic:
            return self._product(x)
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % TILE))
        return torch.cat([self._product(t) for t in padded.split(TILE)])[:rows]


def tied_head(embedding: Tensor, deterministic: bool) -> Linear:
    """An output head that shares the embedding's weight [vocab, hidden]; the embedding keeps the plain copy."""
    head = Linear(embedding.shape[1], embedding.shape[0], bias=False, dtype=embedding.dtype,
                  device=torch.device("meta"), deterministic=deterministic)
    head.weight = embedding
    return head
