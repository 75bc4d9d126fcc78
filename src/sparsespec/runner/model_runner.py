"""Runs one step plan: forward pass, drafting, verification, selection. Everything of a request that lives on the device is here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sparsespec.attention.base import AttentionBatch
from sparsespec.attention.registry import make_backend
from sparsespec.config.engine import EngineConfig
from sparsespec.core.plan import StepPlan, StepResult
from sparsespec.core.request import Request
from sparsespec.kv.pool import KVPool
from sparsespec.kv.table import PageTable
from sparsespec.loader.loaded import LoadedModel
from sparsespec.runner.batch import InputBatch, build_batch, dense_items
from sparsespec.runner.decide import Decider
from sparsespec.runner.logprobs import LogprobCollector
from sparsespec.runner.selection import SelectionStore
from sparsespec.sampling.sampler import Rows
from sparsespec.spec.base import DraftPolicy, Verified

DraftOverride = Callable[[str, int], int | None]
"""(request id, position) → the token to draft there, or None for the model's own."""


@dataclass
class RunnerTimes:
    """Seconds by stage, and bytes of KV read, over the runner's life."""

    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    select: float = 0.0
    kv_bytes_read: int = 0
    last: dict[str, float] = field(default_factory=dict)


class ModelRunner:
    """See the module. `pages` is the scheduler's table: read here, never written."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, pool: KVPool, pages: PageTable, policy: DraftPolicy,
                 max_model_len: int) -> None:
        self.model, self.device, self.pool, self.pages, self.policy = loaded.model, loaded.device, pool, pages, policy
        self.max_drafts = config.speculative.num_speculative_tokens if policy.drafts else 0
        slots = config.scheduler.max_num_seqs
        self.rotary = self.model.rotary(max_model_len + self.max_drafts + 1)
        self.backend = make_backend(config.runner.attention_backend, config.runner.deterministic, loaded.config, pool)
        self.tokens = torch.zeros(slots, max_model_len + self.max_drafts + 2, dtype=torch.int64, device=self.device)
        self.selection = SelectionStore(slots, loaded.config, self.device)
        self.decider = Decider(slots, loaded.config.vocab_size, self.max_drafts, self.device,
                               config.speculative.synthetic_acceptance)
        self.logprobs = LogprobCollector(config.runner.logprobs_mode, self.decider.sampler)
        self.requests: list[Request | None] = [None] * slots
        self.draft_override: DraftOverride | None = None
        self.times = RunnerTimes()

    def seat(self, request: Request) -> None:
        """Bring an admitted request's tokens and sampling settings to its slot."""
        ids = request.prompt_token_ids + request.output_token_ids
        self.tokens[request.slot, :len(ids)] = torch.tensor(ids, dtype=torch.int64)
        self.decider.seat(request)
        self.requests[request.slot] = request

    def leave(self, slot: int) -> None:
        """The slot's request is gone; its settings cost the others nothing any more."""
        request, self.requests[slot] = self.requests[slot], None
        self.decider.leave(slot)
        if request is not None:
            self.logprobs.take_prompt(request)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step. The result holds host arrays: this waits for the device."""
        t0 = time.perf_counter()
        batch = build_batch(plan, self.pages, self.device)
        scores = self._plan_attention(plan, batch)
        t1 = time.perf_counter()
        hidden = self.model(self.tokens[batch.slots, batch.positions], batch.positions, self.backend, self.rotary)
        logits = self.model.logits(hidden[batch.logit_rows])
        self._prompt_logprobs(plan, batch, hidden)
        t2 = time.perf_counter()
        if plan.num_sparse:
            self._draft(plan, batch, logits[:plan.num_sparse])
        result = self._verify(plan, batch, logits)
        t3 = time.perf_counter()
        self._select(plan, result, scores)
        t4 = time.perf_counter()
        t = self.times
        t.prepare, t.forward, t.sample, t.select = t.prepare + t1 - t0, t.forward + t2 - t1, t.sample + t3 - t2, t.select + t4 - t3
        return result

    def _plan_attention(self, plan: StepPlan, batch: InputBatch) -> list[Tensor]:
        """Plan the backend; gives the score buffers that it will fill, one a collecting item."""
        n, c = plan.num_sparse, self.pool.config
        sparse = self.selection.group(plan.slots[:n], plan.starts[:n], self.pages) if n else None
        dense = dense_items(plan, batch, self.pages, self.max_drafts + 1)
        scores: list[Tensor] = []
        sink = None
        if self.policy.uses_scores:
            for item in dense:
                if item.collect >= 0:
                    rows = item.score_rows if self.policy.keeps_rows else 1
                    scores.append(torch.empty(c.num_layers, c.num_kv_heads, rows, item.kv_len - item.score_rows,
                                              dtype=torch.float32, device=self.device))

            def sink(layer: int, index: int, probs: Tensor) -> None:
                self.policy.observe(probs, scores[index][layer])

        self.backend.plan(AttentionBatch(batch.entries, sparse, dense, sink))
        per_token = self.pool.bytes_per_entry * c.num_layers * c.num_kv_heads
        self.times.kv_bytes_read += sum(i.kv_len for i in dense) * per_token + self.selection.bytes_read(
            plan.slots[:n], plan.starts[:n].astype(np.int64), self.pool.bytes_per_entry)
        return scores

    def _draft(self, plan: StepPlan, batch: InputBatch, logits: Tensor) -> None:
        n = plan.num_sparse
        rows = Rows(batch.slots[batch.logit_rows[:n]], batch.positions[batch.logit_rows[:n]] + 1)
        drafted = plan.drafted[:n].astype(np.int64)
        chosen = self.decider.draft(logits, rows, self.tokens, drafted, plan.starts[:n] - drafted)
        if self.draft_override is not None:
            self._override(plan, drafted, chosen)
        self.tokens[rows.slots, rows.positions] = chosen

    def _override(self, plan: StepPlan, drafted: np.ndarray, chosen: Tensor) -> None:
        """Replace chosen [n] where the test door asks for it; the proposal is then one-hot, and verification knows."""
        for i in range(plan.num_sparse):
            request = self.requests[plan.slots[i]]
            forced = self.draft_override(request.request_id, int(plan.starts[i]) + 1) if request and self.draft_override else None
            if forced is not None:
                chosen[i] = forced
                self.decider.force(int(plan.slots[i]), int(drafted[i]), forced)

    def _verify(self, plan: StepPlan, batch: InputBatch, logits: Tensor) -> StepResult:
        emitting = batch.emitting
        if not len(emitting):
            none = np.zeros(0, np.int32)
            return StepResult(none, np.zeros((0, 1), np.int64), none, np.zeros(0, bool))
        n = plan.num_sparse
        rows = Rows(batch.slots[batch.logit_rows[n:]], batch.positions[batch.logit_rows[n:]] + 1)
        drafted = plan.drafted[emitting].astype(np.int64)
        verdict = self.decider.verify(logits[n:], rows, self.tokens, plan.slots[emitting], drafted,
                                      batch.first_logit - n, plan.starts[emitting] + plan.rows[emitting] - drafted)
        result = StepResult(emitting.astype(np.int32), verdict.tokens.cpu().numpy(),
                            verdict.num_emitted.cpu().numpy().astype(np.int32), verdict.bad.cpu().numpy())
        found = self.logprobs.emitted([self.requests[s] for s in plan.slots[emitting]], batch.first_logit - n, result.tokens,
                                      result.num_tokens, logits[n:], rows, self.tokens)
        result.logprobs = {int(emitting[i]): dicts for i, dicts in found.items()}
        return result

    def _prompt_logprobs(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> None:
        for i in range(plan.num_sparse, plan.num_items):
            request, first = self.requests[plan.slots[i]], int(batch.first[i])
            if request is not None and request.params.prompt_logprobs is not None:
                self.logprobs.prompt(request, int(plan.starts[i]), hidden[first:first + int(plan.rows[i])], self.model.logits,
                                     self.tokens)

    def _select(self, plan: StepPlan, result: StepResult, scores: list[Tensor]) -> None:
        """Let the policy choose what each collecting request's next drafts see."""
        index = 0
        for item, num, bad in zip(result.items.tolist(), result.num_tokens.tolist(), result.bad.tolist(), strict=True):
            if not plan.collect[item]:
                continue
            found = scores[index] if scores else None
            index += 1
            if bad:
                continue
            rows, drafted = int(plan.rows[item]), int(plan.drafted[item])
            end, scored = int(plan.starts[item]) + rows, min(rows, self.max_drafts + 1)
            accepted = num - 1
            verified = Verified(end - scored, end - drafted + num, scored, scored - (drafted - accepted), found)
            self.selection.put(int(plan.slots[item]), verified.tail, self.policy.select(verified))
