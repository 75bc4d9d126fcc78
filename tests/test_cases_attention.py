"""Case T32: both backends against dense attention with an explicit mask, over pages in any order, with and without selection."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsespec.attention.base import AttentionBackend, AttentionBatch, DenseItem
from sparsespec.attention.torch_deterministic import DeterministicBackend
from sparsespec.attention.torch_ref import TorchBackend
from sparsespec.config.model import ModelConfig
from sparsespec.kv.pool import KVPool
from sparsespec.kv.table import PageTable
from sparsespec.runner.selection import SelectionStore

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
CONFIG = ModelConfig("llama", 64, 32, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
TOLERANCE = 1e-5


@dataclass
class Sequences:
    """Sequences of given lengths over pages of 4 in random order; keys and values by position, [layers, length, KV heads, D]."""

    lengths: list[int]
    pages: PageTable
    pool: KVPool
    keys: list[Tensor]
    values: list[Tensor]

    @staticmethod
    def random(lengths: list[int], seed: int, page_size: int = 4) -> Sequences:
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        pages = PageTable(len(lengths), max(lengths), page_size, 2 * sum(-(-n // page_size) for n in lengths))
        order = rng.permutation(pages.allocator.num_pages).astype(np.int32)
        for slot, length in enumerate(lengths):
            count = -(-length // page_size)
            pages.pages[slot, :count], order = order[:count], order[count:]
            pages.counts[slot] = count
        shape = (CONFIG.num_layers, -1, CONFIG.num_kv_heads, CONFIG.head_dim)
        draw = lambda n: torch.randn(2 * n * 16, generator=generator).view(shape)  # noqa: E731
        pool = KVPool(CONFIG, pages.capacity, torch.float32, CPU)
        pool.data.fill_(torch.nan)  # whatever is read beyond a sequence shows
        return Sequences(lengths, pages, pool, [draw(n) for n in lengths], [draw(n) for n in lengths])

    def fill(self, slot: int, start: int, end: int) -> None:
        """Write positions [start, end) into the pool, as earlier steps would have."""
        entries = torch.from_numpy(self.pages.positions_to_entries(slot, np.arange(start, end)))
        for layer in range(CONFIG.num_layers):
            self.pool.write(layer, entries, self.keys[slot][layer, start:end], self.values[slot][layer, start:end])


def explicit(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [rows, heads, D] and probabilities [KV heads, group, rows, L] of q over keys, values [L, KV heads, D] where mask
    [KV heads, rows, L]; float64."""
    group = CONFIG.group_size
    queries = q.double().view(len(q), CONFIG.num_kv_heads, group, -1)
    logits = torch.einsum("rhgd,lhd->hgrl", queries, keys.double()) * CONFIG.head_dim**-0.5
    probs = logits.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    return torch.einsum("hgrl,lhd->rhgd", probs, values.double()).reshape(len(q), CONFIG.num_heads, -1), probs


def causal(rows: int, length: int) -> Tensor:
    """[KV heads, rows, length]: the last `rows` positions each see themselves and what precedes them."""
    last = torch.arange(length - rows, length)[:, None]
    return (torch.arange(length) <= last).expand(CONFIG.num_kv_heads, rows, length)


@pytest.mark.parametrize("backend", [TorchBackend, DeterministicBackend])
@pytest.mark.parametrize("seed", range(12))
def test_t32_full_views_of_one_to_nine_queries(backend: type[AttentionBackend], seed: int) -> None:
    """Suffixes that cross pages, prompts in one chunk, short runs of pages and many, in one batch; scores as well."""
    rng = np.random.default_rng(seed)
    rows = [*rng.permutation(np.arange(1, 10)).tolist(), 70, 3]
    lengths = [int(r + rng.integers(0, 60)) for r in rows[:-1]] + [150]
    s = Sequences.random(lengths, seed)
    items, first = [], 0
    for slot, (count, length) in enumerate(zip(rows, lengths, strict=True)):
        s.fill(slot, 0, length - count)
        items.append(DenseItem(first, count, length, s.pages.runs(slot, length), slot, min(count, 9)))
        first += count
    q = torch.randn(CONFIG.num_layers, first, CONFIG.num_heads, CONFIG.head_dim, generator=torch.Generator().manual_seed(seed))
    spans = [(i, n - r, n) for i, (r, n) in enumerate(zip(rows, lengths, strict=True))]
    entries = np.concatenate([s.pages.positions_to_entries(i, np.arange(low, high)) for i, low, high in spans])
    scores: dict[tuple[int, int], Tensor] = {}
    subject = backend(CONFIG, s.pool)
    subject.plan(AttentionBatch(torch.from_numpy(entries), [], items, lambda layer, i, p: scores.update({(layer, i): p.clone()})))
    for layer in range(CONFIG.num_layers):
        k, v = (torch.cat([x[i][layer, low:high] for i, low, high in spans]) for x in (s.keys, s.values))
        out = subject.run(layer, q[layer], k, v).view(first, CONFIG.num_heads, -1)
        for slot, (item, length) in enumerate(zip(items, lengths, strict=True)):
            part = slice(item.row, item.row + item.rows)
            keys, values = s.keys[slot][layer, :length], s.values[slot][layer, :length]
            wanted, probs = explicit(q[layer, part], keys, values, causal(item.rows, length))
            torch.testing.assert_close(out[part].double(), wanted, rtol=0, atol=TOLERANCE)
            scored = probs[:, :, item.rows - item.score_rows:]
            torch.testing.assert_close(scores[layer, slot].double(), scored, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("backend", [TorchBackend, DeterministicBackend])
@pytest.mark.parametrize("budget", [1, 7, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_t32_sparse_views_see_the_selection_and_the_tail(backend: type[AttentionBackend], budget: int, seed: int) -> None:
    """Drafts at 1 to 9 tokens after the selection's tail began. A budget that covers the sequence equals dense attention.

    Selections differ by layer and KV head, in number as well.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    tails = rng.integers(1, 60, 9)
    after = rng.permutation(np.arange(1, 10))  # tokens from the tail's first to the draft's own row
    lengths = (tails + after).tolist()
    s = Sequences.random(lengths, seed)
    store = SelectionStore(len(lengths), CONFIG, CPU)
    chosen: list[Tensor] = []
    for slot, tail in enumerate(tails.tolist()):
        n = min(budget, tail)
        order = torch.rand(CONFIG.num_layers, CONFIG.num_kv_heads, tail, generator=generator).argsort(-1)[..., :n]
        counts = torch.full((CONFIG.num_layers, CONFIG.num_kv_heads), n)
        if 1 < n < tail:
            counts = torch.randint(1, n + 1, counts.shape, generator=generator)
        store.put(slot, tail, order, counts if seed % 2 else None)
        limit = counts if seed % 2 else torch.full_like(counts, n)
        mask = torch.zeros(CONFIG.num_layers, CONFIG.num_kv_heads, lengths[slot], dtype=torch.bool)
        mask[..., tail:] = True
        mask.scatter_(-1, order, torch.arange(n) < limit[..., None])
        chosen.append(mask)
        s.fill(slot, 0, lengths[slot] - 1)
    slots = rng.permutation(len(lengths)).astype(np.int32)
    last = np.array(lengths)[slots] - 1
    view = store.view(slice(0, len(slots)), slots, last, s.pages, s.pool, torch.from_numpy(s.pages.pages))
    entries = np.concatenate([s.pages.positions_to_entries(i, np.array([p])) for i, p in zip(slots, last, strict=True)])
    subject = backend(CONFIG, s.pool)
    subject.plan(AttentionBatch(torch.from_numpy(entries), [view], []))
    q = torch.randn(CONFIG.num_layers, len(slots), CONFIG.num_heads, CONFIG.head_dim, generator=generator)
    for layer in range(CONFIG.num_layers):
        k, v = (torch.stack([x[i][layer, p] for i, p in zip(slots, last, strict=True)]) for x in (s.keys, s.values))
        out = subject.run(layer, q[layer], k, v).view(len(slots), CONFIG.num_heads, -1)
        for row, slot in enumerate(slots.tolist()):
            length = lengths[slot]
            mask = chosen[slot][layer][:, None]
            wanted, _ = explicit(q[layer, row:row + 1], s.keys[slot][layer, :length], s.values[slot][layer, :length], mask)
            torch.testing.assert_close(out[row:row + 1].double(), wanted, rtol=0, atol=TOLERANCE)
            if budget == 1000 and not seed % 2:
                assert bool(mask.all())


@pytest.mark.parametrize("seed", range(4))
def test_t32_drafts_and_verifications_share_a_batch(seed: int) -> None:
    """Sparse rows first, then full items; both kinds of one batch equal their explicit masks."""
    s = Sequences.random([37, 22, 41], seed)
    store = SelectionStore(3, CONFIG, CPU)
    picked = torch.arange(0, 30, 3).expand(CONFIG.num_layers, CONFIG.num_kv_heads, -1)
    store.put(0, 30, picked)
    for slot, end in ((0, 36), (1, 17), (2, 0)):
        s.fill(slot, 0, end)
    view = store.view(slice(0, 1), np.array([0]), np.array([36]), s.pages, s.pool, torch.from_numpy(s.pages.pages))
    items = [DenseItem(1, 5, 22, s.pages.runs(1, 22)), DenseItem(6, 41, 41, s.pages.runs(2, 41))]
    places = [(0, range(36, 37)), (1, range(17, 22)), (2, range(41))]
    entries = np.concatenate([s.pages.positions_to_entries(i, np.array(p)) for i, p in places])
    subject = TorchBackend(CONFIG, s.pool)
    subject.plan(AttentionBatch(torch.from_numpy(entries), [view], items))
    q = torch.randn(47, CONFIG.num_heads, CONFIG.head_dim, generator=torch.Generator().manual_seed(seed))
    for layer in range(CONFIG.num_layers):
        k, v = (torch.cat([x[i][layer, list(p)] for i, p in places]) for x in (s.keys, s.values))
        out = subject.run(layer, q, k, v).view(47, CONFIG.num_heads, -1)
        mask = torch.zeros(CONFIG.num_kv_heads, 1, 37, dtype=torch.bool)
        mask[..., list(range(0, 30, 3)) + list(range(30, 37))] = True
        for slot, part, seen in ((0, slice(0, 1), mask), (1, slice(1, 6), causal(5, 22)), (2, slice(6, 47), causal(41, 41))):
            wanted, _ = explicit(q[part], s.keys[slot][layer, :s.lengths[slot]], s.values[slot][layer, :s.lengths[slot]], seen)
            torch.testing.assert_close(out[part].double(), wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("length", [40, 100, 128, 129, 200, 260])
def test_t48_a_row_alone_and_among_others(length: int) -> None:
    """The deterministic backend gives a row the same bits whatever rows are computed with it, and wherever its pages lie."""
    s, elsewhere = Sequences.random([length], 1), Sequences.random([length], 1, page_size=1)
    q = torch.randn(length, CONFIG.num_heads, CONFIG.head_dim, generator=torch.Generator().manual_seed(0))

    def run(of: Sequences, start: int, end: int) -> Tensor:
        subject = DeterministicBackend(CONFIG, of.pool)
        entries = torch.from_numpy(of.pages.positions_to_entries(0, np.arange(start, end)))
        subject.plan(AttentionBatch(entries, [], [DenseItem(0, end - start, end, of.pages.runs(0, end))]))
        return subject.run(0, q[start:end], of.keys[0][0, start:end], of.values[0][0, start:end])

    whole = run(s, 0, length)
    for of in (s, elsewhere):
        of.fill(0, 0, length)
        for start in range(length - 20, length):
            for end in range(start + 1, length + 1):
                assert torch.equal(run(of, start, end), whole[start:end]), (start, end)
