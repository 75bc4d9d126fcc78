"""The gated feed-forward block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsespec.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)); gate and up are one product."""

    def __init__(self, hidden: int, intermediate: int, *, bias: bool, dtype: torch.dtype, device: torch.device,
                 deterministic: bool) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, (intermediate, intermediate), bias=bias, dtype=dtype, device=device,
                              deterministic=deterministic)
        self.down = Linear(intermediate, hidden, bias=bias, dtype=dtype, device=device, deterministic=deterministic)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)
