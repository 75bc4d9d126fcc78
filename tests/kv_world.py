"""A scheduler, its page table and a host pool without a model: memory is arrays of tags, so that every read can be checked.

    python tests/kv_world.py --steps 1000000 --seed 0

A token's KV is stood for by a tag that depends on all tokens before it, as real KV does. The made-up device writes tags
where a plan says, checks that all committed KV that an item reads is the request's own, and poisons every page that nobody
holds. Copies end late, read their source only then, and may fail, leaving rubbish behind.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from sparsespec.config.engine import SchedulerConfig
from sparsespec.core.plan import StepPlan, StepResult
from sparsespec.core.request import DraftTraits, Request
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.kv.allocator import IntArray
from sparsespec.kv.copier import CopyError, Side
from sparsespec.kv.table import PageTable
from sparsespec.scheduler.kv_policy import make_kv_policy
from sparsespec.scheduler.memory import Memory
from sparsespec.scheduler.phases import make_phases
from sparsespec.scheduler.scheduler import Scheduler

POISON, SCRATCH, RUBBISH = -1, -2, -3
_REPORT = 100_000  # iterations between two lines of `main`
PATIENCE = 60  # iterations with work and without a committed token that are taken for a deadlock


class TagCopier:
    """Moves tags `delay()` iterations late; fails where `fails()` says so."""

    def __init__(self, memory: dict[Side, np.ndarray], delay: Callable[[], int], fails: Callable[[], bool]) -> None:
        self.memory, self.delay, self.fails = memory, delay, fails

    def copy(self, src: Side, dst: Side, src_pages: IntArray, dst_pages: IntArray) -> Any:
        if self.fails():
            raise CopyError("refused")
        return [self.delay(), src, dst, src_pages, dst_pages]

    def done(self, handle: Any) -> bool:
        handle[0] -= 1
        if handle[0] >= 0:
            return False
        _, src, dst, src_pages, dst_pages = handle
        if self.fails():
            self.memory[dst][dst_pages] = RUBBISH
            raise CopyError("failed midway")
        self.memory[dst][dst_pages] = self.memory[src][src_pages]
        return True


class World:
    """See the module. seed: of arrivals' texts, acceptance and copies; the caller chooses what happens when."""

    def __init__(self, seed: int, *, slots: int = 5, pages: int = 24, host_pages: int = 40, page_size: int = 2, k: int = 3,
                 policy: str = "offload", most_delay: int = 5, failures: float = 0.0, caching: bool = True,
                 max_rows: int = 16) -> None:
        self.rng = random.Random(seed)
        self.size, self.k = page_size, k
        table = PageTable(slots, (pages + 4) * page_size, page_size, pages)
        self.tags = {Side.DEVICE: np.full((pages, page_size), POISON, np.int64),
                     Side.HOST: np.full((host_pages, page_size), POISON, np.int64)}
        copier = TagCopier(self.tags, lambda: self.rng.randint(0, most_delay), lambda: self.rng.random() < failures)
        self.memory = Memory(table, host_pages=host_pages, copier=copier, prefix_caching=caching, round_tokens=k + 1)
        self.s = Scheduler(SchedulerConfig(max_num_seqs=slots), max_rows, self.memory, make_kv_policy(policy, host=host_pages > 0),
                           make_phases("unified", k, slots), k, lambda policy: k)
        self.capacity = pages * page_size
        self.texts: dict[Request, np.ndarray] = {}
        self.true: dict[Request, np.ndarray] = {}
        self.ends: dict[Request, int] = {}
        self.live: list[Request] = []
        self.count, self.idle_steps, self.use, self.pressed = 0, 0, 0.0, 0
        self.away_since: dict[Request, int] = {}
        self.longest_away = 0
        self.seen: Counter[str] = Counter()

    # -- what may happen -----------------------------------------------------------------------------------------

    def admit(self, prompt: int, output: int, family: int = 0, salt: str | None = None, stop_early: bool = False) -> Request:
        """A request whose prompt begins as others of its family do."""
        output = max(1, min(output, self.capacity - prompt))
        base = np.random.default_rng(family).integers(0, 50, prompt).tolist()
        if family >= 2 and prompt > 2:
            base[prompt // 2] = self.count % 50
        r = Request(str(self.count), base, SamplingParams(max_tokens=output), 0, False, prompt + output, frozenset({99}),
                    frozenset())
        r.cache_salt = salt
        r.traits = DraftTraits(0, self.k, selects=self.k > 0, prompt_rows=self.k + 1)
        text = np.concatenate([base, np.random.default_rng([family, self.count]).integers(0, 50, output)])
        if stop_early:
            text[prompt + output // 2] = 99
        tags, last = [], 13 if salt else 7
        for token in text.tolist():
            last = hash((last, token)) & (2**62 - 1)
            tags.append(last)
        self.count += 1
        self.texts[r], self.true[r] = text, np.array(tags)
        self.ends[r] = prompt + output // 2 + 1 if stop_early else prompt + output
        self.live.append(r)
        self.s.add(r)
        return r

    def abort(self, r: Request) -> None:
        self._forget(r)
        self.s.finish(r)
        self.seen["aborted"] += 1

    def running(self) -> list[Request]:
        return [r for r in (self.s.requests[i] for i in self.s.movable()) if r is not None]

    def step(self) -> None:
        """One iteration, with every check."""
        before = self.s.counters.num_emitted_tokens
        plan = self.s.schedule()
        self.check()
        if plan is not None:
            result = self._execute(plan)
            self._watch(plan)
            for c in self.s.commit(plan, result):
                want = self.texts[c.request][:c.request.num_tokens].tolist()
                assert c.request.prompt_token_ids + c.request.output_token_ids == want
                if c.finish_reason:
                    assert c.request.num_tokens == self.ends[c.request]
                    self._forget(c.request)
                    self.s.finish(c.request)
                    self.seen["finished"] += 1
            self.check()
        self.idle_steps = 0 if self.s.counters.num_emitted_tokens > before or not self.s.has_work() else self.idle_steps + 1
        assert self.idle_steps < PATIENCE, "no progress"

    def check(self) -> None:
        """Integrity; then nobody may read what is free."""
        self.s.check()
        self.tags[Side.DEVICE][self.memory.pages.allocator.refs == 0] = POISON
        self.tags[Side.HOST][self.memory.host.refs == 0] = POISON

    def drain(self) -> None:
        """Until nothing is left: neither requests nor copies, and no page is held but by cached prefixes."""
        while self.s.has_work() or len(self.memory.transfers):
            self.step()
        assert self.memory.num_free == self.memory.pages.allocator.num_pages
        assert self.memory.num_host_free == self.memory.host.num_pages
        self.memory.prefixes.reset()
        self.check()
        assert self.memory.pages.allocator.num_free == self.memory.pages.allocator.num_pages
        assert self.memory.host.num_free == self.memory.host.num_pages

    # -- the made-up device --------------------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> StepResult:
        device, pages = self.tags[Side.DEVICE].reshape(-1), self.memory.pages
        items = np.flatnonzero(plan.emit)
        width = int(plan.drafted[items].max(initial=0)) + 1
        tokens, nums = np.zeros((len(items), width), np.int64), np.ones(len(items), np.int32)
        for i in range(plan.num_items):
            slot, start, rows, drafted = (int(a[i]) for a in (plan.slots, plan.starts, plan.rows, plan.drafted))
            r = self.s.requests[slot]
            assert r is not None
            committed = int(self.s.computed[slot])
            read = pages.positions_to_entries(slot, np.arange(committed))
            assert (device[read] == self.true[r][:committed]).all(), "an item reads KV that is not its own"
            written = pages.positions_to_entries(slot, np.arange(start, start + rows))
            assert (pages.allocator.refs[written // self.size] == 1).all(), "a shared page is written to"
            if plan.sparse[i]:
                device[written] = SCRATCH
                continue
            good = rows - drafted
            if plan.emit[i]:
                at = int(np.searchsorted(items, i))
                accepted = sum(1 for _ in iter(lambda: self.rng.random() < 0.7, False)) if drafted else 0
                nums[at] = min(accepted, drafted) + 1
                new = self.texts[r][start + good:start + good + int(nums[at])]
                tokens[at, :len(new)] = new
                good += int(nums[at]) - 1
            device[written] = SCRATCH
            device[written[:good]] = self.true[r][start:start + good]
        return StepResult(items.astype(np.int32), tokens, nums, np.zeros(len(items), bool))

    def _watch(self, plan: StepPlan) -> None:
        """Device pool use under pressure, and how long each request was away."""
        on = set(plan.slots.tolist())
        for r in self.live:
            if r.slot in on:
                self.longest_away = max(self.longest_away, self.s.now - self.away_since.pop(r, self.s.now))
            elif r.slot >= 0:
                self.away_since.setdefault(r, self.s.now)
        if self.s.waiting or self.memory.swapper.queue:
            self.pressed += 1
            self.use += 1 - self.memory.num_free / self.memory.pages.allocator.num_pages

    def _forget(self, r: Request) -> None:
        self.live.remove(r)
        for kept in (self.texts, self.true, self.ends):
            del kept[r]
        self.away_since.pop(r, None)


def random_rule(w: World, rng: random.Random) -> None:
    """One of everything that may happen."""
    roll = rng.random()
    running = w.running()
    if roll < 0.12 and len(w.live) < 12:
        w.admit(rng.randint(1, 20), rng.randint(1, 28), rng.randint(0, 5), rng.choice([None, None, "a"]), rng.random() < 0.2)
    elif roll < 0.14 and w.live:
        w.abort(rng.choice(w.live))
    elif roll < 0.18 and running:
        w.s.preempt(rng.choice(running))
        w.seen["preempted"] += 1
    elif roll < 0.19 and running:
        w.s.recompute(rng.choice(running).slot)
    elif roll < 0.195:
        w.memory.prefixes.reset()
    w.step()


def main() -> None:
    """Random rules for many steps; each world lives for a few hundred, then it is drained and another one begins."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    seen: Counter[str] = Counter()
    steps, worlds, start = 0, 0, time.perf_counter()
    while steps < args.steps:
        w = World(rng.getrandbits(32), slots=rng.randint(2, 6), pages=rng.randint(24, 40), host_pages=rng.choice([0, 12, 60]),
                  page_size=rng.choice([1, 2, 3]), k=rng.randint(0, 4),
                  policy=rng.choice(["offload", "offload", "recompute", "reserve"]), most_delay=rng.choice([0, 1, 5]),
                  failures=rng.choice([0.0, 0.0, 0.1, 1.0]), caching=rng.random() < 0.7)
        for _ in range(500):
            random_rule(w, rng)
        w.drain()
        steps += w.s.now
        worlds += 1
        seen.update(w.seen)
        seen.update(offloaded=w.memory.swapper.offloaded_tokens, restored=w.memory.swapper.restored_tokens,
                    recomputed=w.s.counters.num_recomputed_tokens, cached=w.s.counters.num_cached_tokens,
                    spilled_pages=w.memory.prefixes.spilled_pages, failed_copies=w.memory.transfers.num_failed,
                    stalled_rows=w.s.counters.num_stalled_rows)
        if steps // _REPORT > (steps - w.s.now) // _REPORT or steps >= args.steps:
            print(f"seed {args.seed}: {steps} iterations in {worlds} worlds, {time.perf_counter() - start:.0f} s; "
                  f"{dict(sorted(seen.items()))}", flush=True)


if __name__ == "__main__":
    main()
