"""Runs one step plan: forward pass, drafting, verification, selection. Everything of a request that lives on the device is here."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sparsespec.attention.base import AttentionBatch, SparseRows
from sparsespec.attention.items import DeviceViews, Items
from sparsespec.attention.registry import make_backend
from sparsespec.config.engine import EngineConfig
from sparsespec.core.plan import StepPlan, StepResult
from sparsespec.core.request import Request
from sparsespec.kv.pool import KVPool
from sparsespec.kv.table import PageTable
from sparsespec.loader.loaded import LoadedModel
from sparsespec.runner.batch import InputBatch, build_batch, dense_items, spread
from sparsespec.runner.decide import Decider, DraftItems
from sparsespec.runner.logprobs import LogprobCollector
from sparsespec.runner.proposals import Proposals
from sparsespec.runner.selection import SelectionStore
from sparsespec.sampling.sampler import Rows
from sparsespec.spec.base import Features, Verified
from sparsespec.spec.registry import PolicySet


@dataclass
class RunnerTimes:
    """Seconds by stage, and bytes of KV read, over the runner's life."""

    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    select: float = 0.0
    propose: float = 0.0
    kv_bytes_read: int = 0


class ModelRunner:
    """See the module. `pages` is the scheduler's table: read here, never written."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, pool: KVPool, pages: PageTable, policies: PolicySet,
                 max_model_len: int) -> None:
        self.model, self.device, self.pool, self.pages, self.policies = loaded.model, loaded.device, pool, pages, policies
        self.max_drafts = policies[0].traits(0).k
        slots = config.scheduler.max_num_seqs
        self.rotary = self.model.rotary(max_model_len + self.max_drafts + 1)
        self.backend = make_backend(config.runner.attention_backend, config.runner.deterministic, loaded.config, pool,
                                    self.max_drafts)
        self.tokens = torch.zeros(slots, max_model_len + self.max_drafts + 2, dtype=torch.int64, device=self.device)
        self.selection = SelectionStore(slots, loaded.config, self.device)
        self.decider = Decider(slots, loaded.config.vocab_size, self.max_drafts, self.device,
                               config.speculative.synthetic_acceptance)
        self.logprobs = LogprobCollector(config.runner.logprobs_mode, self.decider.sampler)
        self.proposals = Proposals(policies, self.decider, self.tokens)
        self.requests: list[Request | None] = [None] * slots
        self.policy = np.zeros(slots, np.int32)  # index of each slot's policy
        self._selected = np.zeros(slots, bool)  # whether the policy has selected for the slot's request yet
        self._rejected = np.zeros(slots, np.int32)  # tokens that each slot's last verification fell short of the most it could give
        self.times = RunnerTimes()

    def seat(self, request: Request, slot: int, ids: list[int]) -> None:
        """Bring an admitted request's tokens and sampling settings to its slot."""
        self.tokens[slot, :len(ids)] = torch.tensor(ids, dtype=torch.int64)
        self.decider.seat(request, slot)
        self.requests[slot] = request
        self.policy[slot], self._selected[slot] = request.traits.policy, False

    def leave(self, slot: int) -> None:
        """The slot's request is gone; its settings cost the others nothing any more."""
        request, self.requests[slot] = self.requests[slot], None
        self.decider.leave(slot)
        self.policies[int(self.policy[slot])].leave(slot)
        if request is not None:
            self.logprobs.take_prompt(request)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step. The result holds host arrays: this waits for the device."""
        t0 = time.perf_counter()
        plan = self.resolve(plan)
        batch = build_batch(plan, self.pages, self.device)
        scores = self._plan_attention(plan, batch)
        t1 = time.perf_counter()
        layers = self.policies[0].feature_layers
        hidden, features = self.model(self.tokens[batch.slots, batch.positions], batch.positions, self.backend, self.rotary, layers)
        logits = self.model.logits(hidden[batch.logit_rows])
        self._prompt_logprobs(plan, batch, hidden)
        t2 = time.perf_counter()
        counts = self._draft(plan, batch, logits[:plan.num_sparse_rows]) if plan.num_sparse else None
        result = self._verify(plan, batch, logits)
        if counts is not None:
            result.draft_counts = counts.cpu().numpy().astype(np.int32)
            if self.decider.confidence is not None:
                result.confidence = self.decider.confidence.cpu().numpy()
        t3 = time.perf_counter()
        self._select(plan, result, scores)
        if layers:
            self._absorb(plan, batch, result, features)
        t4 = time.perf_counter()
        t = self.times
        t.prepare, t.forward, t.sample, t.select = t.prepare + t1 - t0, t.forward + t2 - t1, t.sample + t3 - t2, t.select + t4 - t3
        return result

    def resolve(self, plan: StepPlan) -> StepPlan:
        """The plan as it is, now that the verifications before it have run: assumed starts go back by what was rejected."""
        if not plan.assumed.any():
            return plan
        return replace(plan, starts=plan.starts - np.where(plan.assumed, self._rejected[plan.slots], 0))

    @torch.inference_mode()
    def propose(self, slots: np.ndarray, lengths: np.ndarray, drafted: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Let proposers put tokens after those that `slots` [n] have buffered; gives how many each [n], at most `most`."""
        start = time.perf_counter()
        counts = self.proposals.fill([self.requests[s] for s in slots], slots, lengths, drafted, most)
        self.times.propose += time.perf_counter() - start
        return counts

    def _plan_attention(self, plan: StepPlan, batch: InputBatch) -> dict[int, Tensor]:
        """Plan the backend; gives the buffers that it will fill with the scores of collecting items, by item."""
        c = self.pool.config
        scored: dict[int, int] = {}
        means: dict[int, int] = {}  # like scored, of items whose mean scores the backend keeps
        scores: dict[int, Tensor] = {}
        for i in np.flatnonzero(plan.collect).tolist():
            slot, rows, end = int(plan.slots[i]), int(plan.rows[i]), int(plan.starts[i] + plan.rows[i])
            policy = self.policies[int(self.policy[slot])]
            if policy.wants_scores(not self._selected[slot]) and self.backend.resolves_views and policy.averages:
                means[i] = policy.score_rows(rows, not self._selected[slot])
            elif policy.wants_scores(not self._selected[slot]):
                scored[i] = policy.score_rows(rows, not self._selected[slot])
                scores[i] = torch.empty(c.num_layers, c.num_kv_heads, policy.kept_rows(scored[i]), end - scored[i],
                                        dtype=torch.float32, device=self.device)
        dense = dense_items(plan, batch, self.pages, scored) if scored or not self.backend.resolves_views else []
        sinks = [(self.policies[int(self.policy[plan.slots[i]])], scores[i]) for i in scored]

        def sink(layer: int, index: int, probs: Tensor) -> None:
            policy, out = sinks[index]
            policy.observe(probs, out[layer])

        n = plan.num_sparse
        table = torch.from_numpy(self.pages.pages).to(self.device)
        items, views = self._items(plan, table, means) if self.backend.resolves_views else (None, None)
        sparse = self._sparse_rows(plan, table) if n and (items is None or self.policies.reselects) else []
        self.backend.plan(AttentionBatch(batch.entries, sparse, dense, sink if scored else None, items, views))
        scores.update((i, self.backend.mean_scores(i).unsqueeze(2)) for i in means)
        per_token = self.pool.bytes_per_entry * c.num_layers * c.num_kv_heads
        ends = (plan.starts + plan.rows).astype(np.int64)
        self.times.kv_bytes_read += int(ends[n:].sum()) * per_token + self.selection.bytes_read(
            plan.slots[:n], ends[:n] - 1, self.pool.bytes_per_entry)
        return scores

    def _items(self, plan: StepPlan, table: Tensor, means: dict[int, int]) -> tuple[Items, DeviceViews]:
        """The step's views as arrays. Rows of drafts that sparse attention made have an LSE, which scores are normalised with."""
        slots, store = plan.slots, self.selection
        score_rows, refs = np.zeros(len(slots), np.int32), np.zeros(len(slots), np.int32)
        for i, rows in means.items():
            score_rows[i] = rows
            policy = self.policies[int(self.policy[slots[i]])]
            refs[i] = plan.drafted[i] if policy.selects and plan.rows[i] == plan.drafted[i] + 1 else 0
        items = Items.build(slots, plan.starts, plan.rows, sparse=plan.sparse, tails=np.where(plan.sparse, store.tail[slots], 0),
                            widths=np.where(plan.sparse, store.width[slots], 0), score_rows=score_rows, refs=refs)
        return items, DeviceViews(table, self.pages.page_size, store.positions, store.counts)

    def _sparse_rows(self, plan: StepPlan, table: Tensor) -> list[SparseRows]:
        """The views of the draft rows: those with a stored selection together, and one part for each reselecting policy."""
        n = plan.num_sparse
        slots, last = np.repeat(plan.slots[:n], plan.rows[:n]), spread(plan.starts[:n], plan.rows[:n])
        own = self.policy[slots]
        own[~np.array([p.reselects for p in self.policies.policies])[own]] = -1
        kinds = np.unique(own)
        parts = []
        for kind in kinds.tolist():
            where = np.flatnonzero(own == kind)
            rows = slice(0, len(slots)) if len(kinds) == 1 else torch.from_numpy(where).to(self.device)
            parts.append(self.selection.view(rows, slots[where], last[where], self.pages, self.pool, table,
                                             self.policies[kind].reselect if kind >= 0 else None))
        return parts

    def _draft(self, plan: StepPlan, batch: InputBatch, logits: Tensor) -> Tensor:
        n, rows = plan.num_sparse, plan.num_sparse_rows
        drafted = plan.drafted[:n].astype(np.int64)
        items = DraftItems(plan.slots[:n].astype(np.int64), drafted, plan.rows[:n].astype(np.int64) - 1, plan.starts[:n] - drafted)
        counts = self.decider.draft(logits, Rows(batch.slots[:rows], batch.positions[:rows] + 1), self.tokens, items)
        if self.proposals.override is not None:
            self.proposals.override_drafts([self.requests[s] for s in items.slots], items)
        return counts

    def _verify(self, plan: StepPlan, batch: InputBatch, logits: Tensor) -> StepResult:
        emitting = batch.emitting
        if not len(emitting):
            none = np.zeros(0, np.int32)
            return StepResult(none, np.zeros((0, 1), np.int64), none, np.zeros(0, bool))
        n = plan.num_sparse_rows
        rows = Rows(batch.slots[batch.logit_rows[n:]], batch.positions[batch.logit_rows[n:]] + 1)
        drafted = plan.drafted[emitting].astype(np.int64)
        verdict = self.decider.verify(logits[n:], rows, self.tokens, plan.slots[emitting], drafted,
                                      batch.first_logit - n, plan.starts[emitting] + plan.rows[emitting] - drafted)
        result = StepResult(emitting.astype(np.int32), verdict.tokens.cpu().numpy(),
                            verdict.num_emitted.cpu().numpy().astype(np.int32), verdict.bad.cpu().numpy())
        self._rejected[plan.slots[emitting]] = plan.drafted[emitting] + 1 - result.num_tokens
        found = self.logprobs.emitted([self.requests[s] for s in plan.slots[emitting]], batch.first_logit - n, result.tokens,
                                      result.num_tokens, logits[n:], rows, self.tokens)
        result.logprobs = {int(emitting[i]): dicts for i, dicts in found.items()}
        return result

    def _prompt_logprobs(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> None:
        for i in range(plan.num_sparse, plan.num_items):
            request, first = self.requests[plan.slots[i]], int(batch.first[i])
            if request is not None and request.params.prompt_logprobs is not None:
                self.logprobs.prompt(request, int(plan.slots[i]), int(plan.starts[i]), hidden[first:first + int(plan.rows[i])],
                                     self.model.logits, self.tokens)

    def _select(self, plan: StepPlan, result: StepResult, scores: dict[int, Tensor]) -> None:
        """Let each collecting request's policy choose what its next drafts see."""
        for item, num, bad in zip(result.items.tolist(), result.num_tokens.tolist(), result.bad.tolist(), strict=True):
            if not plan.collect[item]:
                continue
            if bad:  # nobody will read what comes after it, but a step that is on its way drafts it
                self.selection.put_none(int(plan.slots[item]), int(plan.starts[item]))
                continue
            slot, rows, drafted = int(plan.slots[item]), int(plan.rows[item]), int(plan.drafted[item])
            policy, prompt = self.policies[int(self.policy[slot])], not self._selected[slot]
            end, scored = int(plan.starts[item]) + rows, policy.score_rows(rows, prompt)
            rejected = drafted - (num - 1)
            verified = Verified(slot, prompt, end - scored, end - rejected + 1, scored, max(1, scored - rejected), scores.get(item),
                                partial(self._keys, slot))
            chosen = policy.select(verified)
            self._selected[slot] = True
            self.selection.put(slot, verified.tail if chosen.tail is None else chosen.tail, chosen.positions, chosen.counts)

    def _keys(self, slot: int, start: int, end: int) -> Tensor:
        """Keys [layers, KV heads, end - start, head_dim] of a slot's positions."""
        entries = torch.from_numpy(self.pages.positions_to_entries(slot, np.arange(start, end))).to(self.device)
        return self.pool.data[:, 0].index_select(2, entries)

    def _absorb(self, plan: StepPlan, batch: InputBatch, result: StepResult, features: Tensor) -> None:
        """Show each policy the hidden states of its rows that are committed now: prefill chunks, and accepted rows."""
        keep = plan.rows.astype(np.int64)
        keep[plan.sparse] = 0
        keep[result.items] -= plan.drafted[result.items] - (result.num_tokens - 1)
        owner = self.policy[plan.slots]
        for index in np.unique(owner[keep > 0]).tolist():
            if self.policies[index].feature_layers:
                rows = torch.from_numpy(spread(batch.first, np.where(owner == index, keep, 0))).to(self.device)
                self.policies[index].absorb(Features(features[:, rows], batch.slots[rows], batch.positions[rows]), self.tokens)
