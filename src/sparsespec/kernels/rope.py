"""What lies between the QKV product and attention, in one launch: norms of q and k, rotary embedding, and the KV write.

Each step rounds to the tensors' dtype where the PyTorch layers do, so that results agree with theirs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8  # heads of one program


@triton.jit
def _prepared(x_ptr, weight_ptr, at, d, ok, rstd, NORM: tl.constexpr):
    """x at elements d of each head in float32, normed if asked; rounded to x's dtype."""
    x = tl.load(x_ptr + at[:, None] + d[None, :], mask=ok, other=0.0)
    if NORM:
        weight = tl.load(weight_ptr + d[None, :], mask=ok, other=0.0)
        x = ((x.to(tl.float32) * rstd[:, None]).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _rotated(x_ptr, weight_ptr, cos_ptr, sin_ptr, at, head_ok, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr):
    """Heads [n, BLOCK_D] after norm and rotation; `sin` has its first half negated."""
    d = tl.arange(0, BLOCK_D)
    ok = head_ok[:, None] & (d < D)[None, :]
    rstd = tl.zeros_like(at.to(tl.float32))
    if NORM:
        raw = tl.load(x_ptr + at[:, None] + d[None, :], mask=ok, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(raw * raw, 1) / D + eps)
    x = _prepared(x_ptr, weight_ptr, at, d, ok, rstd, NORM)
    other = _prepared(x_ptr, weight_ptr, at, (d + D // 2) % D, ok, rstd, NORM)
    cos = tl.load(cos_ptr + d, mask=d < D, other=0.0).to(x.dtype).to(tl.float32)
    sin = tl.load(sin_ptr + d, mask=d < D, other=0.0).to(x.dtype).to(tl.float32)
    first = (x.to(tl.float32) * cos[None, :]).to(x.dtype)
    second = (other.to(tl.float32) * sin[None, :]).to(x.dtype)
    return (first.to(tl.float32) + second.to(tl.float32)).to(x.dtype)


@triton.jit
def rope_write_kernel(qkv_ptr, q_ptr, k_ptr, v_ptr, positions_ptr, entries_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
                      eps, stride_row, stride_head, STRIDE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                      D: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr, BLOCK_H: tl.constexpr):
    """Program (row, b): block b of the query heads, then of the KV heads."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    x_ptr = qkv_ptr + row * stride_row
    position = tl.load(positions_ptr + row).to(tl.int64)
    cos_ptr += position * D
    sin_ptr += position * D
    d = tl.arange(0, BLOCK_D)
    if block < q_blocks:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        q = _rotated(x_ptr, q_weight_ptr, cos_ptr, sin_ptr, head * D, head < HEADS, eps, D, BLOCK_D, NORM)
        tl.store(q_ptr + (row * HEADS + head)[:, None] * D + d[None, :], q.to(q_ptr.dtype.element_ty),
                 mask=(head < HEADS)[:, None] & (d < D)[None, :])
    else:
        head = (block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        ok = (head < KV_HEADS)[:, None] & (d < D)[None, :]
        entry = tl.load(entries_ptr + row).to(tl.int64)
        offset = (head.to(tl.int64) * stride_head + entry * STRIDE)[:, None] + d[None, :]
        k = _rotated(x_ptr, k_weight_ptr, cos_ptr, sin_ptr, (HEADS + head) * D, head < KV_HEADS, eps, D, BLOCK_D, NORM)
        tl.store(k_ptr + offset, k.to(k_ptr.dtype.element_ty), mask=ok)
        v = tl.load(x_ptr + ((HEADS + KV_HEADS + head) * D)[:, None] + d[None, :], mask=ok, other=0.0)
        tl.store(v_ptr + offset, v.to(v_ptr.dtype.element_ty), mask=ok)


def rope_and_write(qkv: Tensor, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, entries: Tensor, cos: Tensor,
                   sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float) -> None:
    """Norm and rotate q and k of qkv [N, (heads + 2 KV heads) · D] by positions [N]; q to `q` [N, heads, D] and k, v to
    entries [N] of keys, values [KV heads, entries, D] (views whose last dimension is dense).

    cos, sin [max_len, D] float32 as of `RotaryEmbedding`; norms: weights [D] of q and k, None for models without.
    """
    rows, heads, dim = q.shape
    kv_heads = keys.shape[0]
    q_weight, k_weight = norms if norms is not None else (cos, cos)
    blocks = triton.cdiv(heads, _HEADS) + triton.cdiv(kv_heads, _HEADS)
    rope_write_kernel[(rows, blocks)](
        qkv, q, keys, values, positions, entries, cos, sin, q_weight, k_weight, eps, qkv.stride(0), keys.stride(0),
        STRIDE=keys.stride(1), HEADS=heads, KV_HEADS=kv_heads, D=dim, BLOCK_D=triton.next_power_of_2(dim),
        NORM=norms is not None, BLOCK_H=_HEADS, num_warps=2)


@triton.jit
def write_kernel(from_k_ptr, from_v_ptr, k_ptr, v_ptr, entries_ptr, k_row, v_row, stride_head, STRIDE: tl.constexpr,
                 KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr):
    """Program (row, b): K and V of a block of KV heads to their entry."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    ok = (head < KV_HEADS)[:, None] & (d < D)[None, :]
    entry = tl.load(entries_ptr + row).to(tl.int64)
    source = (head * D)[:, None] + d[None, :]
    offset = (head.to(tl.int64) * stride_head + entry * STRIDE)[:, None] + d[None, :]
    tl.store(k_ptr + offset, tl.load(from_k_ptr + row * k_row + source, mask=ok).to(k_ptr.dtype.element_ty), mask=ok)
    tl.store(v_ptr + offset, tl.load(from_v_ptr + row * v_row + source, mask=ok).to(v_ptr.dtype.element_ty), mask=ok)


def write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, entries: Tensor) -> None:
    """Store k, v [N, KV heads, D] (heads dense) at entries [N] of keys, values [KV heads, entries, D]."""
    rows, kv_heads, dim = k.shape
    write_kernel[(rows, triton.cdiv(kv_heads, _HEADS))](
        k, v, keys, values, entries, k.stride(0), v.stride(0), keys.stride(0), STRIDE=keys.stride(1), KV_HEADS=kv_heads, D=dim,
        BLOCK_D=triton.next_power_of_2(dim), BLOCK_H=_HEADS, num_warps=2)
