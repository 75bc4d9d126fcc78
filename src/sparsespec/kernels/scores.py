"""Exact attention scores of an item's last rows, with a second reading of K; attention left each row's LSE before."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsespec.kernels.attention import ITEM_FIELDS


@triton.jit
def score_kernel(q_ptr, k_ptr, which_ptr, item_ptr, table_ptr, lse_ptr, scores_ptr, layer, layers, max_pages, score_ld,
                 stride_head, scale, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                 STRIDE: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Program (i, h, b): keys [b * BLOCK_N, ...) of item which[i] and KV head h, before its first scored row.

    scores [KV heads, score_ld], of which an item's keys start at its score offset: the mean over scored rows and the group of
    the softmax probability. M >= score_rows * GROUP.
    """
    item_ptr += tl.load(which_ptr + tl.program_id(0)) * ITEM_FIELDS
    head = tl.program_id(1)
    slot, row0 = tl.load(item_ptr), tl.load(item_ptr + 1)
    rows, start = tl.load(item_ptr + 2), tl.load(item_ptr + 3)
    score_at, score_rows = tl.load(item_ptr + 6), tl.load(item_ptr + 7)
    end = start + rows - score_rows
    index = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    if tl.program_id(2) * BLOCK_N >= end:
        return
    packed = tl.arange(0, M)
    row = rows - score_rows + packed // GROUP
    q_head = head * GROUP + packed % GROUP
    ok = packed < score_rows * GROUP
    d = tl.arange(0, BLOCK_D)
    q_offset = ((row0 + row) * (GROUP * KV_HEADS) + q_head).to(tl.int64) * D
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
    at = ((slot.to(tl.int64) * layers + layer) * RING + (start + row) % RING) * (GROUP * KV_HEADS) + q_head
    lse = tl.load(lse_ptr + at, mask=ok, other=0.0)
    seen = tl.minimum(index, end - 1)
    entry = tl.load(table_ptr + slot.to(tl.int64) * max_pages + seen // PAGE) * PAGE + seen % PAGE
    offset = head.to(tl.int64) * stride_head + entry.to(tl.int64)[:, None] * STRIDE + d[None, :]
    k = tl.load(k_ptr + offset, mask=(d < D)[None, :], other=0.0)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
    p = tl.where(ok[:, None], tl.exp2(logits - lse[:, None]), 0.0)
    tl.store(scores_ptr + head.to(tl.int64) * score_ld + score_at + index, tl.sum(p, 0) / (score_rows * GROUP), mask=index < end)
