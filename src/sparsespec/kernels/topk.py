"""The k largest scores of many ragged rows in one launch: which KV entries the next drafts see.

A row's threshold is found by bisection on the bits of its scores, which are not negative, so that their order as floats is
that of their bits. A row of up to `MAX_BLOCK` scores stays in registers; longer ones are read again from the L2 cache for each
of the at most 31 steps. A step halves the range of bits, and the search ends as soon as exactly k scores reach the threshold.
Of scores that equal the k-th largest, the first are taken.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 16384


@triton.jit
def _bits(scores_ptr, index, length):
    """Bits of scores as integers; negative ones and NaN count as 0, padding as -1, so that it is never chosen."""
    x = tl.load(scores_ptr + index, mask=index < length, other=0.0).to(tl.float32)
    return tl.where(index < length, tl.where(x > 0.0, x, 0.0).to(tl.int32, bitcast=True), -1)


@triton.jit
def _take(bits, index, taken, tied, low, ties, positions_ptr):
    """Write the positions of a block that belong to the k largest, after the `taken` before; `tied` ties came before too."""
    tie = (bits == low).to(tl.int32)
    rank = tied + tl.cumsum(tie, 0)
    chosen = (bits > low) | ((tie == 1) & (rank <= ties))
    place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(positions_ptr + place, index, mask=chosen)
    return taken + tl.sum(chosen.to(tl.int32), 0), tied + tl.sum(tie, 0)


@triton.jit
def topk_kernel(scores_ptr, starts_ptr, lengths_ptr, k_ptr, slots_ptr, positions_ptr, counts_ptr, layers, kv_heads,
                score_layer, score_head, width, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """Program (i, layer * kv_heads + head): k[i] of the lengths[i] scores from starts[i] on, to slots[i]."""
    item, layer, head = tl.program_id(0), tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    length, slot = tl.load(lengths_ptr + item), tl.load(slots_ptr + item).to(tl.int64)
    k = tl.minimum(tl.minimum(tl.load(k_ptr + item), length), width)
    if k < 0:
        return
    scores_ptr += layer.to(tl.int64) * score_layer + head.to(tl.int64) * score_head + tl.load(starts_ptr + item)
    row = slot * layers * kv_heads + tl.program_id(1)
    positions_ptr += row * width
    tl.store(counts_ptr + row, k)
    if k == 0:
        return
    n = tl.arange(0, BLOCK)
    low, high = 0, 0x7F800001  # at least k scores reach low, fewer reach high
    reached = length
    if ONE:
        bits = _bits(scores_ptr, n, length)
        while (high - low > 1) & (reached != k):
            middle = low + (high - low) // 2
            found = tl.sum((bits >= middle).to(tl.int32), 0)
            low = tl.where(found >= k, middle, low)
            reached = tl.where(found >= k, found, reached)
            high = tl.where(found >= k, high, middle)
    else:
        while (high - low > 1) & (reached != k):
            middle = low + (high - low) // 2
            found = tl.zeros([BLOCK], tl.int32)
            for block in range(0, length, BLOCK):
                found += (_bits(scores_ptr, block + n, length) >= middle).to(tl.int32)
            found = tl.sum(found, 0)
            low = tl.where(found >= k, middle, low)
            reached = tl.where(found >= k, found, reached)
            high = tl.where(found >= k, high, middle)
    # all above low, then the first that equal it until k are taken
    if ONE:
        _take(bits, n, 0, 0, low, k - tl.sum((bits > low).to(tl.int32), 0), positions_ptr)
    else:
        above = tl.zeros([BLOCK], tl.int32)
        for block in range(0, length, BLOCK):
            above += (_bits(scores_ptr, block + n, length) > low).to(tl.int32)
        ties = k - tl.sum(above, 0)
        taken, tied = 0, 0
        for block in range(0, length, BLOCK):
            bits = _bits(scores_ptr, block + n, length)
            taken, tied = _take(bits, block + n, taken, tied, low, ties, positions_ptr)


def select_topk(scores: Tensor, starts: Tensor, lengths: Tensor, k: Tensor, slots: Tensor, positions: Tensor, counts: Tensor,
                longest: int) -> None:
    """Write the positions of the k[i] largest of scores[layer, head, starts[i] : starts[i] + lengths[i]] to slot slots[i].

    scores [layers, KV heads, keys], not negative; starts, lengths, k, slots [n] int32 (k < 0: leave the slot alone; at most
    `width` are taken); positions [slots, layers, KV heads, width] int32, counts [slots, layers, KV heads] int32. longest: an
    upper bound of lengths.
    """
    layers, kv_heads, _ = scores.shape
    block = min(MAX_BLOCK, max(128, triton.next_power_of_2(longest)))
    topk_kernel[(len(slots), layers * kv_heads)](
        scores, starts, lengths, k, slots, positions, counts, layers, kv_heads, scores.stride(0), scores.stride(1),
        positions.shape[3], BLOCK=block, ONE=longest <= block, num_warps=max(1, min(16, block // 1024)))

