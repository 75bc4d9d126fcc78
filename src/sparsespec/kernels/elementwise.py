"""RMS norm with the residual sum before it, and SiLU(gate) · up: one reading and one writing each.

Each step rounds to the tensors' dtype where the PyTorch layers do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def norm_kernel(x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Program i: row i."""
    row = tl.program_id(0).to(tl.int64) * size
    d = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + d, mask=d < size, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(delta_ptr + row + d, mask=d < size, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row + d, x, mask=d < size)
    h = x.to(tl.float32)
    h = (h * tl.rsqrt(tl.sum(h * h, 0) / size + eps)).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=d < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + d, (h * weight).to(x.dtype), mask=d < size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dimension of x [..., size]."""
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    norm_kernel[(x.numel() // size,)](x, x, weight, x, out, size, eps, ADD=False, BLOCK=triton.next_power_of_2(size),
                                      num_warps=_warps(size))
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMS norm · weight) for x, delta [N, size]."""
    x, delta = x.contiguous(), delta.contiguous()
    total, out, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    norm_kernel[(x.numel() // size,)](x, delta, weight, total, out, size, eps, ADD=True, BLOCK=triton.next_power_of_2(size),
                                      num_warps=_warps(size))
    return total, out


def _warps(size: int) -> int:
    return max(1, min(8, triton.next_power_of_2(size) // 512))


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Program (row, b): a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * size + d, mask=d < size, other=0.0)
    up = tl.load(x_ptr + row * 2 * size + size + d, mask=d < size, other=0.0)
    g = gate.to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * size + d, (silu * up.to(tl.float32)).to(gate.dtype), mask=d < size)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of gate_up [N, 2 · size], the two side by side: [N, size]."""
    gate_up = gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    silu_mul_kernel[(rows, triton.cdiv(size, 1024))](gate_up, out, size, BLOCK=1024, num_warps=4)
    return out
