"""Fused attention: one launch over work of every kind (plain decode, drafts, verification, prefill chunks), and its merge.

A tile is the queries of one item and one KV head: its rows times the group, packed, since they share K and V. What a tile
sees is a *view*: entry i is the i-th selected position while i < count, and position tail + i - count after that. A full
view has no selection and its tail at 0, so both kinds run the same loop, and nothing is materialised: positions become
pool entries through the page table while K and V of the blocks before are in flight.

Work is cut along the line of all tiles' blocks into equal shares, one a program (Stream-K); a tile that lies in several
shares leaves partial results, which `merge_kernel` combines by their log-sum-exp. Logits are in units of log 2.

Score collection rides on a tile that holds all scored rows: a key's score is the sum over rows of exp(logit - lse). The
true LSE of a row is known only after its last block, so the LSE that the row's own draft pass found is used instead: it
covers the entries with most of the mass. A row whose true LSE is higher by d weighs exp(d) more than it should; the ranking
needs no more. The alternative, exact sums from partial maxima, needs one number a row and key, a fifth of the bytes of K and
V. Where no draft gave an LSE (the end of a prompt), `scores.py` reads K again with the true one.
"""

from __future__ import annotations

import triton
import triton.language as tl

ITEM_FIELDS = tl.constexpr(16)  # slot, row, rows, start, tail, sparse, score offset, score rows, refs, keep LSE
WORK_FIELDS = tl.constexpr(8)  # item, head, query tile, lo, hi, part (-1: none), kind
SMALL, LARGE, COLLECT = 0, 1, 2  # kinds of tiles
HIDDEN = tl.constexpr(-1.0e30)  # a logit that is not seen; finite, so that nothing becomes NaN


@triton.jit
def _chosen(index, hi, stored, positions_ptr):
    """Selected positions at view indices, of `stored` ones; what lies past a selection's count is not used."""
    return tl.load(positions_ptr + index, mask=index < tl.minimum(hi, stored), other=0)


@triton.jit
def _entries(index, chosen, hi, count, tail, table_ptr, PAGE: tl.constexpr):
    """Pool entries of view indices; past the end the last tail position again, which is legal to read."""
    position = tl.where(index < count, chosen, tail + tl.minimum(index, hi - 1) - count)
    return tl.load(table_ptr + position // PAGE) * PAGE + position % PAGE


@triton.jit
def _tile(q_ptr, k_ptr, v_ptr, out_ptr, part_out_ptr, part_lse_ptr, item_ptr, table_ptr, positions_ptr, counts_ptr, lse_ptr,
          scores_ptr, head, qtile, lo, hi, part, layer, layers, max_pages, width, score_ld, stride_head, scale,
          GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, STRIDE: tl.constexpr,
          PAGE: tl.constexpr, RING: tl.constexpr, M: tl.constexpr, PART_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
          SCORED: tl.constexpr):
    """One piece of work: view indices [lo, hi) of one query tile."""
    slot, row0 = tl.load(item_ptr), tl.load(item_ptr + 1)
    rows, start, tail = tl.load(item_ptr + 2), tl.load(item_ptr + 3), tl.load(item_ptr + 4)
    sparse = tl.load(item_ptr + 5) != 0
    stored = tl.where(sparse, width, 0)
    selection = (slot.to(tl.int64) * layers + layer) * KV_HEADS + head
    count = tl.load(counts_ptr + selection, mask=sparse, other=0)
    positions_ptr += selection * width
    table_ptr += slot.to(tl.int64) * max_pages
    k_ptr += head.to(tl.int64) * stride_head
    v_ptr += head.to(tl.int64) * stride_head

    packed = qtile * M + tl.arange(0, M)
    row = packed // GROUP
    q_head = head * GROUP + packed % GROUP
    row_ok = row < rows
    d = tl.arange(0, BLOCK_D)
    q_offset = ((row0 + row) * (GROUP * KV_HEADS) + q_head).to(tl.int64) * D
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    hi = tl.minimum(hi, count + start + rows - tail)
    log2_scale = scale * 1.4426950408889634

    if SCORED:
        score_at, score_rows, refs = tl.load(item_ptr + 6), tl.load(item_ptr + 7), tl.load(item_ptr + 8)
        score_end = start + rows - score_rows
        scored = row_ok & (row >= rows - score_rows)
        ref_row = (start + tl.minimum(row, refs - 1)) % RING
        ref_offset = ((slot.to(tl.int64) * layers + layer) * RING + ref_row) * (GROUP * KV_HEADS) + q_head
        ref = tl.load(lse_ptr + ref_offset, mask=scored, other=0.0)
        share = tl.where(scored, 1.0 / (GROUP * score_rows), 0.0)
        scores_ptr += head.to(tl.int64) * score_ld + score_at

    top = tl.full([M], HIDDEN, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    n = tl.arange(0, BLOCK_N)
    limit = tl.minimum(start + row + count - tail, hi - 1)  # the last index that a row sees
    # positions are loaded two blocks ahead of K and V, and entries one, so that neither is waited for
    entry = _entries(lo + n, _chosen(lo + n, hi, stored, positions_ptr), hi, count, tail, table_ptr, PAGE)
    chosen = _chosen(lo + BLOCK_N + n, hi, stored, positions_ptr)
    for block in range(lo, hi, BLOCK_N):
        offset = entry[:, None] * STRIDE + d[None, :]
        if D == BLOCK_D:
            k = tl.load(k_ptr + offset)
            v = tl.load(v_ptr + offset)
        else:
            k = tl.load(k_ptr + offset, mask=(d < D)[None, :], other=0.0)
            v = tl.load(v_ptr + offset, mask=(d < D)[None, :], other=0.0)
        entry = _entries(block + BLOCK_N + n, chosen, hi, count, tail, table_ptr, PAGE)
        chosen = _chosen(block + 2 * BLOCK_N + n, hi, stored, positions_ptr)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale
        logits = tl.where((block + n)[None, :] <= limit[:, None], logits, HIDDEN)
        new_top = tl.maximum(top, tl.max(logits, 1))
        p = tl.exp2(logits - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        if SCORED:
            weight = tl.exp2(tl.minimum(new_top - ref, 20.0)) * share
            tl.store(scores_ptr + block + n, tl.sum(p * weight[:, None], 0), mask=block + n < tl.minimum(hi, score_end))
        top = new_top

    safe = tl.where(total == 0.0, 1.0, total)
    acc = acc / safe[:, None]
    lse = top + tl.log2(safe)
    if part < 0:
        tl.store(out_ptr + q_offset[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty),
                 mask=row_ok[:, None] & (d < D)[None, :])
        first_kept = tl.where(tl.load(item_ptr + 9) != 0, rows - RING, rows)
        kept = ((slot.to(tl.int64) * layers + layer) * RING + (start + row) % RING) * (GROUP * KV_HEADS) + q_head
        tl.store(lse_ptr + kept, lse, mask=row_ok & (row >= first_kept))
    else:
        m = part.to(tl.int64) * PART_ROWS + tl.arange(0, M)
        tl.store(part_out_ptr + m[:, None] * BLOCK_D + d[None, :], acc)
        tl.store(part_lse_ptr + m, lse)


@triton.jit
def attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, part_out_ptr, part_lse_ptr, starts_ptr, work_ptr, item_ptr, table_ptr,
                     positions_ptr, counts_ptr, lse_ptr, scores_ptr, layer, layers, max_pages, width, score_ld, stride_head,
                     scale, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                     STRIDE: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr, M_SMALL: tl.constexpr,
                     M_LARGE: tl.constexpr, N_SMALL: tl.constexpr, N_LARGE: tl.constexpr,
                     KINDS: tl.constexpr):
    """Program p does the work [starts[p], starts[p + 1]). KINDS: bits of the kinds that can occur, the rest is left out.

    q, out [N, heads, D]; k, v of one layer, entry e of head h at h * stride_head + e * STRIDE; table [slots, max_pages];
    positions [slots, layers, KV heads, width]; counts [slots, layers, KV heads]; lse [slots, layers, RING, heads];
    scores [KV heads, score_ld] of this layer, an item's keys from its score offset on; parts: [parts, M_LARGE, BLOCK_D] and
    [parts, M_LARGE].
    """
    for w in range(tl.load(starts_ptr + tl.program_id(0)), tl.load(starts_ptr + tl.program_id(0) + 1)):
        at = work_ptr + w * WORK_FIELDS
        item, head, qtile = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        lo, hi, part, kind = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5), tl.load(at + 6)
        item_at = item_ptr + item * ITEM_FIELDS
        if KINDS & 1:
            if kind == 0:
                _tile(q_ptr, k_ptr, v_ptr, out_ptr, part_out_ptr, part_lse_ptr, item_at, table_ptr, positions_ptr, counts_ptr,
                      lse_ptr, scores_ptr, head, qtile, lo, hi, part, layer, layers, max_pages, width, score_ld, stride_head,
                      scale, GROUP, KV_HEADS, D, BLOCK_D, STRIDE, PAGE, RING, M_SMALL, M_LARGE, N_SMALL, False)
        if KINDS & 2:
            if kind == 1:
                _tile(q_ptr, k_ptr, v_ptr, out_ptr, part_out_ptr, part_lse_ptr, item_at, table_ptr, positions_ptr, counts_ptr,
                      lse_ptr, scores_ptr, head, qtile, lo, hi, part, layer, layers, max_pages, width, score_ld, stride_head,
                      scale, GROUP, KV_HEADS, D, BLOCK_D, STRIDE, PAGE, RING, M_LARGE, M_LARGE, N_LARGE, False)
        if KINDS & 4:
            if kind == 2:
                _tile(q_ptr, k_ptr, v_ptr, out_ptr, part_out_ptr, part_lse_ptr, item_at, table_ptr, positions_ptr, counts_ptr,
                      lse_ptr, scores_ptr, head, qtile, lo, hi, part, layer, layers, max_pages, width, score_ld, stride_head,
                      scale, GROUP, KV_HEADS, D, BLOCK_D, STRIDE, PAGE, RING, M_LARGE, M_LARGE, N_LARGE, True)


@triton.jit
def merge_kernel(out_ptr, part_out_ptr, part_lse_ptr, merge_ptr, item_ptr, lse_ptr, num_merges_ptr, layer, layers,
                 GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, RING: tl.constexpr,
                 M_LARGE: tl.constexpr, ROWS: tl.constexpr):
    """Combine the partial results of each tile that was cut: program (i, j) rows [j * ROWS, (j + 1) * ROWS) of tile i."""
    if tl.program_id(0) >= tl.load(num_merges_ptr):
        return
    at = merge_ptr + tl.program_id(0) * WORK_FIELDS
    item, head, first_packed = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    part, parts, tile_rows = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    item_at = item_ptr + item * ITEM_FIELDS
    slot, row0, rows, start = tl.load(item_at), tl.load(item_at + 1), tl.load(item_at + 2), tl.load(item_at + 3)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = (first_packed + m) // GROUP
    q_head = head * GROUP + (first_packed + m) % GROUP
    ok = (m < tile_rows) & (row < rows)
    d = tl.arange(0, BLOCK_D)
    if first_packed + tl.program_id(1) * ROWS >= rows * GROUP:
        return
    top = tl.full([ROWS], HIDDEN * 2, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in range(part, part + parts):
        at_m = tl.cast(i, tl.int64) * M_LARGE + m
        lse = tl.load(part_lse_ptr + at_m, mask=ok, other=HIDDEN)
        piece = tl.load(part_out_ptr + at_m[:, None] * BLOCK_D + d[None, :], mask=ok[:, None], other=0.0)
        new_top = tl.maximum(top, lse)
        fade, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
        total = total * fade + weight
        acc = acc * fade[:, None] + piece * weight[:, None]
        top = new_top
    offset = ((row0 + row) * (GROUP * KV_HEADS) + q_head).to(tl.int64) * D
    tl.store(out_ptr + offset[:, None] + d[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty),
             mask=ok[:, None] & (d < D)[None, :])
    first_kept = tl.where(tl.load(item_at + 9) != 0, rows - RING, rows)
    kept = ((slot.to(tl.int64) * layers + layer) * RING + (start + row) % RING) * (GROUP * KV_HEADS) + q_head
    tl.store(lse_ptr + kept, top + tl.log2(total), mask=ok & (row >= first_kept))
