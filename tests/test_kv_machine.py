"""The KV manager against everything that may happen in any order: hypothesis looks for an order that breaks it.

After each rule both pools are checked, and whoever reads KV reads its own (see kv_world.py, whose `main` does the same for a
million iterations).
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kv_world import World
from sparsespec.core.request import Request


class KVMachine(RuleBasedStateMachine):
    """Admit, step, abort, preempt, offload, restore, finish."""

    @initialize(seed=st.integers(0, 2**16), slots=st.integers(2, 5), pages=st.integers(12, 24), host=st.sampled_from([0, 6, 40]),
                size=st.sampled_from([1, 2]), k=st.integers(0, 3), delay=st.sampled_from([0, 2, 5]), caching=st.booleans(),
                policy=st.sampled_from(["offload", "offload", "recompute", "reserve"]), failures=st.sampled_from([0.0, 0.0, 0.2]))
    def begin(self, seed: int, slots: int, pages: int, host: int, size: int, k: int, delay: int, caching: bool, policy: str,
              failures: float) -> None:
        self.w = World(seed, slots=slots, pages=pages, host_pages=host, page_size=size, k=k, policy=policy, most_delay=delay,
                       failures=failures, caching=caching)

    @rule(prompt=st.integers(1, 11), output=st.integers(1, 14), family=st.integers(0, 3), salted=st.booleans(), stop=st.booleans())
    def admit(self, prompt: int, output: int, family: int, salted: bool, stop: bool) -> None:
        if len(self.w.live) < 8:
            self.w.admit(prompt, output, family, "a" if salted else None, stop)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.w.step()

    def pick(self, index: int, among: list[Request]) -> Request:
        return among[index % len(among)]

    @precondition(lambda self: self.w.live)
    @rule(index=st.integers(0, 7))
    def abort(self, index: int) -> None:
        self.w.abort(self.pick(index, self.w.live))
        self.w.check()

    @precondition(lambda self: self.w.running())
    @rule(index=st.integers(0, 7))
    def preempt(self, index: int) -> None:
        self.w.s.preempt(self.pick(index, self.w.running()))
        self.w.check()

    @precondition(lambda self: self.w.running())
    @rule(index=st.integers(0, 7))
    def offload(self, index: int) -> None:
        request = self.pick(index, self.w.running())
        swapped = self.w.s.swap(request.slot)
        assert swapped or self.w.memory.num_host_free < self.w.memory.pages.needed(request.num_tokens)
        self.w.check()

    @precondition(lambda self: len(self.w.memory.swapper.queue))
    @rule()
    def restore(self) -> None:
        self.w.memory.resume(idle=True)
        self.w.check()

    @rule()
    def forget_prefixes(self) -> None:
        self.w.memory.prefixes.reset()
        self.w.check()

    def teardown(self) -> None:
        if hasattr(self, "w"):
            self.w.drain()


def test_any_order_of_events() -> None:
    run_state_machine_as_test(KVMachine, settings=settings(max_examples=2000, stateful_step_count=10, deadline=None))


def loaded_world(policy: str = "offload", **settings: int) -> World:
    """Three times as many requests as the pool holds, all there at once."""
    w = World(3, slots=128, pages=4000, host_pages=16000, page_size=2, policy=policy, caching=False, max_rows=128,
              **settings)  # type: ignore[arg-type]
    for i in range(120):
        w.admit(4 + i % 5, 180 + 3 * (i % 17), family=1000 + i)
    return w


def test_under_three_times_the_pool_the_device_stays_full_and_nothing_is_recomputed() -> None:
    for delay in (0, 5):
        w = loaded_world(most_delay=delay)
        demand = sum(-(-n // w.size) for n in w.ends.values())
        assert demand >= 3 * w.memory.pages.allocator.num_pages
        w.drain()
        swapper = w.memory.swapper
        assert swapper.offloaded_tokens == swapper.restored_tokens > 0
        assert w.s.counters.num_recomputed_tokens == 0
        print(f"copies up to {delay} iterations late: pool use {w.use / w.pressed:.4f} over {w.pressed} iterations, "
              f"{swapper.offloaded_tokens} tokens offloaded, longest time away {w.longest_away} iterations")
        assert w.use / w.pressed >= 0.97


def test_first_in_first_out_both_ways() -> None:
    """The longest resident leaves; the longest absent returns; nobody new starts while anybody is away."""
    w = loaded_world(most_delay=3)
    s, swapper = w.s, w.memory.swapper
    out: deque[int] = deque()
    swap, back = s.swap, swapper.back

    def watched_swap(slot: int) -> bool:
        assert s.order[slot] == s.order[s.movable()].min()
        done = swap(slot)
        out.extend([slot] * done)
        return done

    def watched_back(record: object) -> None:
        assert record is swapper.queue[0]
        assert record.slot == out.popleft()  # type: ignore[attr-defined]
        back(record)  # type: ignore[arg-type]

    s.swap, swapper.back = watched_swap, watched_back  # type: ignore[method-assign]
    started: list[str] = []
    while s.has_work():
        away = len(swapper.queue)
        w.step()
        if away and len(swapper.queue):
            assert not s.admitted
        started += [r.request_id for r in s.admitted]
        s.admitted.clear()
    assert started == [str(i) for i in range(120)]
    assert swapper.restored_tokens > 0
    assert w.longest_away < 400
