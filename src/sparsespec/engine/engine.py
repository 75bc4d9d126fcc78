"""The engine: takes requests, runs steps, gives outputs. One step is schedule, execute, commit; engine/pipeline.py says when.

    engine = Engine(EngineConfig.from_kwargs(model=None))
    engine.add_request("a", "Why is the sky blue?", SamplingParams(max_tokens=64))
    while engine.has_work():
        for output in engine.step(): ...
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from sparsespec.config.engine import EngineConfig
from sparsespec.config.speculative import SpeculativeConfig
from sparsespec.core.errors import InvalidValueError, NumericalError, StateError, UnsupportedError
from sparsespec.core.outputs import RequestOutput
from sparsespec.core.plan import StepPlan, StepResult
from sparsespec.core.request import Request
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.engine.admission import Admission, Limits, Prompt
from sparsespec.engine.memory import pool_tokens
from sparsespec.engine.output import Completion, Group
from sparsespec.engine.pipeline import Arrival, Pipeline, Step
from sparsespec.engine.weights import WeightKeeper, WeightSource
from sparsespec.kv.host_pool import HostPool
from sparsespec.kv.pool import KVPool
from sparsespec.kv.table import PageTable
from sparsespec.kv.transfer import make_copier
from sparsespec.loader import load_model
from sparsespec.loader.eagle3 import load_eagle3
from sparsespec.loader.loaded import LoadedModel
from sparsespec.metrics.rows import PhaseRows
from sparsespec.metrics.stats import collect_stats
from sparsespec.runner.calibrate import measure_costs
from sparsespec.runner.model_runner import ModelRunner
from sparsespec.scheduler.kv_policy import make_kv_policy
from sparsespec.scheduler.memory import Memory
from sparsespec.scheduler.outcome import Commit
from sparsespec.scheduler.phases import make_phases
from sparsespec.scheduler.scheduler import Scheduler
from sparsespec.spec.adaptive import AdaptiveLength, FixedLength
from sparsespec.spec.registry import PolicySet
from sparsespec.spec.stopping import EarlyStop

_POLL = 1e-4  # seconds between looks at copies for which everybody waits


class Engine:
    """See the module. Not thread-safe: one thread calls it."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        _refuse_unsupported(config)
        self.config = config
        self.loaded = loaded or load_model(config.load, deterministic=config.runner.deterministic)
        spec, model = config.speculative, self.loaded.config
        self.policies = PolicySet(spec, model)
        self.policy = self.policies[0]
        max_drafts = self.policy.traits(0).k
        self.max_model_len, tokens = _lengths(config, self.loaded, max_drafts, _bind_head(self.policies, spec, self.loaded))
        slots = config.scheduler.max_num_seqs
        self.pages = PageTable(slots, self.max_model_len + max_drafts + 1, config.cache.page_size, tokens // config.cache.page_size)
        self.pool = KVPool(model, self.pages.capacity, self.loaded.dtype, self.loaded.device)
        cache = config.cache
        self.host_pool = HostPool(cache.kv_offloading_size, self.pool, cache.page_size) if cache.kv_offloading_size else None
        memory = Memory(self.pages, host_pages=self.host_pool.num_pages if self.host_pool else 0,
                        copier=make_copier(self.pool, self.host_pool, cache.page_size),
                        prefix_caching=cache.enable_prefix_caching, round_tokens=max_drafts + 1)
        self.runner = ModelRunner(self.loaded, config, self.pool, self.pages, self.policies, self.max_model_len)
        self.pipeline = Pipeline(self.runner, spec.verification)
        self.controller = self._controller(max_drafts)
        self.early_stop = None if spec.draft_cost is None else EarlyStop(slots, max_drafts, spec.draft_cost)
        self.runner.decider.wants_confidence = self.early_stop is not None
        max_rows = config.scheduler.max_num_batched_tokens or (512 if self.loaded.device.type == "cpu" else 2048)
        self.scheduler = Scheduler(config.scheduler, max_rows, memory,
                                   make_kv_policy(spec.kv_policy, host=self.host_pool is not None),
                                   make_phases(spec.schedule, max_drafts, slots), max_drafts, self._draft_length,
                                   assumes=spec.verification == "device")
        self.admission = Admission(Limits(self.max_model_len, self.pages.capacity, model.vocab_size), self.loaded.tokenizer,
                                   self.loaded.eos_token_ids, config.load.seed)
        self.weights = WeightKeeper(self.loaded, self.pool)
        self._weights_version = self.weights.version
        self.groups: dict[str, Group] = {}
        self._owners: dict[Request, tuple[Group, Completion]] = {}
        self._ready: list[RequestOutput] = []  # outputs of steps that were waited for between two calls of step()
        self.seconds = {"schedule": 0.0, "execute": 0.0, "wait": 0.0, "commit": 0.0}
        self.rows = PhaseRows()

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, *, stream: bool = False,
                    deltas: bool = False) -> None:
        """Queue a prompt. With `stream` every step that adds to it gives an output, else only its end does. With `deltas`
        outputs hold what is new since the last one instead of all so far.

        Raises a SparseSpecError that names what is wrong; then nothing was queued.
        """
        if request_id in self.groups:
            raise InvalidValueError("request_id", request_id, "already in the engine", "Give each request an id of its own")
        if not isinstance(params, SamplingParams):
            raise InvalidValueError("sampling_params", params, "not a SamplingParams", "Build one with SamplingParams(...)")
        self.weights.check()
        if self._weights_version != self.weights.version:  # another engine that shares them changed them
            self.reset_prefix_cache()
        text, ids = self.admission.tokenize(prompt)
        salt = self.admission.cache_salt(prompt)
        traits = self.policies.traits(params.speculative_config)
        requests = self.admission.build(request_id, ids, params, traits)
        group = Group(request_id, text, ids, stream, self.config.speculative.synthetic_acceptance is None,
                      deltas=deltas)
        for index, request in enumerate(requests):
            request.metrics.arrival_time = time.monotonic()
            request.cache_salt = salt
            completion = Completion(request, index, self.loaded.tokenizer)
            group.completions.append(completion)
            self._owners[request] = (group, completion)
            self.policies.hold(traits.policy)
            self.scheduler.add(request)
        self.groups[request_id] = group

    def has_work(self) -> bool:
        """Whether any request waits or runs, or outputs are yet to be given."""
        return self.scheduler.has_work() or bool(self._ready)

    def step(self) -> list[RequestOutput]:
        """One iteration. Gives the outputs of requests that ended or, if streamed, grew."""
        t0 = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._submit(plan)
        t1 = time.perf_counter()
        self.seconds["schedule"] += t1 - t0
        done = self._finish(drain=plan is None)
        if plan is None and not done and self.scheduler.has_work():
            time.sleep(_POLL)
        if not self.groups:
            self.settle()
        outputs, self._ready = self._ready, []
        if not self.scheduler.num_running:
            self.scheduler.check()
        return outputs

    def settle(self) -> None:
        """Wait for the steps under way; the next call of step() gives their outputs."""
        while self._finish(drain=True):
            pass

    def _submit(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        arriving = [Arrival(r, r.slot, r.prompt_token_ids + r.output_token_ids) for r in scheduler.admitted]
        for a in arriving:
            a.request.metrics.first_scheduled_time = a.request.metrics.first_scheduled_time or time.monotonic()
        self.controller.prepare(plan)
        self.rows.count(plan)
        self.pipeline.submit(plan, scheduler.vacated, arriving)
        scheduler.vacated.clear()
        scheduler.admitted.clear()
        scheduler.launch(plan)

    def _finish(self, *, drain: bool) -> bool:
        """Commit the step whose result is due, with `drain` any that is under way; False if there is none."""
        t0 = time.perf_counter()
        done = self.pipeline.collect(drain=drain)
        if done is None:
            return False
        t1 = time.perf_counter()
        commits = self.scheduler.commit(done.plan, done.result)
        self._ready += self._outputs(commits, done.result)
        self._learn(done, commits)
        self._propose()
        for stage, spent in (("execute", done.seconds), ("wait", t1 - t0), ("commit", time.perf_counter() - t1)):
            self.seconds[stage] += spent
        return True

    def _controller(self, max_drafts: int) -> FixedLength:
        if not (self.config.speculative.adaptive and self.policy.drafts):
            return FixedLength(max_drafts)
        model, size = self.loaded.config, self.loaded.dtype.itemsize
        return AdaptiveLength(self.policy, lambda: self.pipeline.run(partial(measure_costs, self.runner)),
                              model.weights_a_pass * size, model.kv_bytes_per_token(size))

    def _learn(self, done: Step, commits: Sequence[Commit]) -> None:
        """Let the controllers see a step; where one stops drafting, drafts that are under way are verified as they are."""
        if self.early_stop is not None:
            self.early_stop.verified(done.plan, done.result)
            self.scheduler.stop_drafting(self.early_stop.drafted(done.plan, done.result))
        before = self.controller.draft_length()
        self.controller.observe(done.plan, [(c.drafted, c.accepted) for c in commits if not c.request.traits.policy], done.seconds)
        if before and not self.controller.draft_length():
            s = self.scheduler
            s.stop_drafting(np.flatnonzero(s.active & (s.policy == 0) & (s.drafted < s.target)))

    def _propose(self) -> None:
        """Let cheap proposers extend the rounds that wait for them; requests that ended meanwhile have left."""
        scheduler = self.scheduler
        slots = scheduler.wants_proposals[scheduler.active[scheduler.wants_proposals]]
        if len(slots):
            most = scheduler.proposal_room(slots)
            length, drafted = scheduler.length[slots], scheduler.drafted[slots]
            scheduler.offer(slots, self.pipeline.run(partial(self.runner.propose, slots, length, drafted, most)))

    def _draft_length(self, policy: int) -> int:
        """k that rounds of a policy begin with now: the controller's for the engine's own, fixed for one that a request chose."""
        return self.policies[policy].traits(policy).k if policy else self.controller.draft_length()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request wherever it is, free what it holds and give what it has; None if it is not there."""
        group = self.groups.get(request_id)
        if group is None:
            return None
        for completion in group.completions:
            if completion.output.finish_reason is None:
                completion.finish("abort")
                self._end(completion.request)
        del self.groups[request_id]
        return group.result()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; pages in use stay with their requests."""
        self.scheduler.memory.prefixes.reset()
        self._weights_version = self.weights.version

    def update_weights(self, source: WeightSource) -> None:
        """Replace the weights, of every engine that shares them, and forget cached prefixes.

        source: a path, or Hugging Face names → tensors. Raises StateError while requests run, ModelLoadError for what does
        not fit: then no request is served until an update succeeds.
        """
        self._need_idle("update_weights")
        try:
            self.weights.update(source)
        finally:
            self.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give device memory back: the KV pool's, and the weights', which level 1 keeps on the host and level 2 drops.

        Raises StateError while requests run.
        """
        self._need_idle("sleep")
        self.reset_prefix_cache()
        self.weights.sleep(level)

    def wake_up(self) -> None:
        """Take the memory again. After a sleep of level 2 update_weights() has to follow."""
        self.weights.wake_up()

    def _need_idle(self, call: str) -> None:
        if not self.groups:
            self.settle()
        if self.has_work():
            raise StateError(call, self.scheduler.num_running, "requests are in the engine", "Let them finish, or abort them")
        while len(self.scheduler.memory.transfers):
            self.scheduler.memory.poll()
            time.sleep(_POLL)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, a plain dict: see metrics/stats.py."""
        return {**collect_stats(self.scheduler, self.runner, self.seconds, self.controller.draft_length()), **self.rows.stats()}

    def _outputs(self, commits: Sequence[Commit], result: StepResult) -> list[RequestOutput]:
        touched: dict[str, Group] = {}
        now = time.monotonic()
        for c in commits:
            group, completion = self._owners[c.request]
            touched[group.request_id] = group
            m = c.request.metrics
            m.first_token_time = m.first_token_time or now
            m.num_drafts += c.drafted > 0
            m.num_draft_tokens += c.drafted
            accepted = c.accepted if c.drafted else 0
            m.num_accepted_tokens += accepted
            completion.add(c.tokens, result.logprobs.get(c.item), c.finish_reason, c.stop_token, accepted)
            if c.bad and completion.output.finish_reason is None:
                group.error = NumericalError(c.request.request_id, c.request.num_tokens)
                completion.finish("error")
            if completion.output.finish_reason is not None:
                if c.request.params.prompt_logprobs is not None:
                    group.prompt_logprobs = self.runner.logprobs.take_prompt(c.request)
                self._end(c.request, sound=not c.bad)
        outputs = []
        for request_id, group in touched.items():
            if group.finished():
                del self.groups[request_id]
            if group.finished() or group.stream:
                outputs.append(group.result())
        return outputs

    def _end(self, request: Request, *, sound: bool = True) -> None:
        self.scheduler.finish(request, sound=sound)
        if self._owners.pop(request, None):
            self.policies.release(request.traits.policy)


def _refuse_unsupported(config: EngineConfig) -> None:
    spec = config.speculative
    if spec.draft_cost is not None and (spec.verification != "sync" or spec.method in ("ngram", "eagle3", "hierarchy", "triforce")):
        raise UnsupportedError("speculative_config.draft_cost", spec.draft_cost, "needs drafts that come and are read one by one",
                               'Leave it out, or use a policy of sparse drafts alone with verification="sync"')
    if config.parallel.tensor_parallel_size != 1:
        raise UnsupportedError("tensor_parallel_size", config.parallel.tensor_parallel_size, "not available yet", "Use 1")


def _bind_head(policies: PolicySet, spec: SpeculativeConfig, loaded: LoadedModel) -> int:
    """Load the draft head if the policy needs one; gives the bytes that it keeps of a token."""
    if not policies[0].needs_head:
        if spec.model is not None:
            raise InvalidValueError("speculative_config.model", spec.model, f"method {spec.method!r} uses no draft head",
                                    'Set method="eagle3", or leave it out')
        return 0
    head = load_eagle3(spec.model, loaded)
    policies.bind(head)
    return head.kv_bytes_per_token


def _lengths(config: EngineConfig, loaded: LoadedModel, max_drafts: int, head_bytes: int) -> tuple[int, int]:
    """(max_model_len, tokens of the KV pool). Raises InvalidValueError where they can not be had."""
    asked, most = config.load.max_model_len, loaded.config.max_position_embeddings
    if asked is not None and asked > most:
        raise InvalidValueError("max_model_len", asked, f"more than the {most} positions that the model knows",
                                f"Give at most {most}")
    length = asked or most
    tokens = pool_tokens(config, loaded, length, head_bytes)
    if asked is None:
        length = min(length, tokens)
    if max_drafts + 1 >= length:
        raise InvalidValueError("speculative_config.num_speculative_tokens", max_drafts,
                                f"larger than the context of {length} tokens",
                                f"Give at most {max(length - 2, 1)}")
    return length, tokens
