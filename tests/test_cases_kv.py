"""KV memory under pressure, on a real model: cases T22, T24, T25, T28 and T45, and the faults that copies may have.

Whatever gives way when the pool is full, and however late or wrong a copy is, every output is what a big pool gives.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from driving import assert_idle, completions, serve, speculate, token_ids
from reference import Reference, tiny_path, tiny_prompts
from sparsespec import LLM, BatchError, CapacityError, InvalidValueError, RequestOutput, SamplingParams
from sparsespec.kv.copier import Copier, Side
from sparsespec.loader.loaded import LoadedModel
from sparsespec.testing import (
    FailingCopier,
    LateCopier,
    check_integrity,
    force_preemption,
    no_host_memory,
    poison_free_pages,
    use_copier,
)

Models = dict[str, LoadedModel]
Cases = dict[str, list[tuple[list[int], list[int]]]]
pytestmark = pytest.mark.usefixtures("one_thread")

TOKEN = 512 / (1 << 30)  # GiB that one token of the tiny model takes
HOST = 8192 * TOKEN
GREEDY = SamplingParams(temperature=0, max_tokens=64)


def engine(models: Models, pool: int, *, k: int = 4, page: int = 4, host: float | None = HOST, policy: str = "offload",
           **settings: Any) -> LLM:
    config = speculate(k, 0.3, kv_policy=policy) if k else {"method": "none", "kv_policy": policy}
    return LLM(models["qwen3"], **{"max_model_len": 256, "kv_cache_tokens": pool, "page_size": page, "kv_offloading_size": host,
                                   "speculative_config": config, **settings})


def mixed(count: int, tokens: int) -> list[SamplingParams]:
    """Greedy, greedy, seeded, unseeded, and so on."""
    return [SamplingParams(temperature=float(i % 4 > 1), seed=i if i % 4 == 2 else None, max_tokens=tokens) for i in range(count)]


@pytest.mark.parametrize(("k", "page", "policy"), [(4, 16, "offload"), (8, 1, "offload"), (0, 16, "recompute")])
def test_t22_output_is_complete_after_preemption(k: int, page: int, policy: str, tiny_models: Models) -> None:
    """8 requests of 200 tokens in a pool for about 2.5 of them; swapping computes nothing twice."""
    prompts = [p[:30] for p in tiny_prompts(16, seed=10) if len(p) >= 30][:8]
    params = mixed(8, 200)
    wanted = token_ids(serve(engine(tiny_models, 4096, k=k, page=page), prompts, params))
    small = engine(tiny_models, 576, k=k, page=page, policy=policy, enable_prefix_caching=False)
    out = completions(serve(small, prompts, params))
    stats = small.stats()
    assert stats["num_preemptions"] > 0
    assert (stats["num_recomputed_tokens"] > 0) is (policy == "recompute")
    assert stats["offloaded_tokens"] == stats["restored_tokens"]
    assert (stats["offloaded_tokens"] > 0) is (policy == "offload")
    assert [(len(c.token_ids), c.finish_reason) for c in out] == [(200, "length")] * 8
    reference = Reference.directory(tiny_path("qwen3"))
    for i, (prompt, c, ids) in enumerate(zip(prompts, out, wanted, strict=True)):
        if i % 4 < 2:
            reference.check(prompt, c.token_ids)
        if i % 4 < 3:
            assert c.token_ids == ids, i


@pytest.mark.parametrize("delay", [0, 5])
def test_t24_two_swapped_requests_of_which_the_pool_holds_either(delay: int, tiny_models: Models, tiny_cases: Cases) -> None:
    """Both are sent away when they have grown; at no time do 50 iterations pass without a committed token."""
    cases = tiny_cases["qwen3"][:2]
    pool = max(len(p) for p, _ in cases) + 64
    llm = engine(tiny_models, pool + 12, host=HOST)
    done: dict[str, RequestOutput] = {}
    with use_copier(llm, lambda inner: LateCopier(inner, lambda: delay)):
        for name, (prompt, _) in zip("ab", cases, strict=True):
            llm.engine.add_request(name, prompt[:40], GREEDY)
        emitted, quiet, forced = 0, 0, False
        while len(done) < 2:
            done.update((o.request_id, o) for o in llm.engine.step())
            check_integrity(llm)
            now = llm.stats()["num_emitted_tokens"]
            emitted, quiet = now, 0 if now > emitted else quiet + 1
            assert quiet < 50
            if now > 12 and not forced:
                forced = True
                for slot in llm.engine.scheduler.movable().tolist():
                    assert llm.engine.scheduler.swap(slot)
                assert llm.stats()["swapped"] > 0
    wanted = serve(engine(tiny_models, 4096), [p[:40] for p, _ in cases], GREEDY)
    assert [done[n].outputs[0].token_ids for n in "ab"] == token_ids(wanted)
    assert llm.stats()["num_recomputed_tokens"] == 0
    assert_idle(llm)


@pytest.mark.parametrize("policy", ["offload", "recompute", "reserve"])
def test_t25_a_request_that_can_never_fit(policy: str, tiny_models: Models, tiny_cases: Cases) -> None:
    """Its prompt fits, prompt and max_tokens do not: an error at once. Without max_tokens "length" ends it where the pool does."""
    cases = sorted(tiny_cases["qwen3"], key=lambda c: len(c[0]))[:3]
    llm = engine(tiny_models, 160, policy=policy)
    with pytest.raises(BatchError) as info:
        llm.generate([*(p for p, _ in cases), [1] * 90], [*[GREEDY] * 3, SamplingParams(max_tokens=80)], use_tqdm=False)
    assert isinstance(info.value.errors[3], CapacityError)
    assert info.value.errors[3].field == "max_tokens"
    assert token_ids(info.value.outputs[:3]) == [ids for _, ids in cases]
    out = serve(llm, [[1] * 90, cases[0][0]], [SamplingParams(temperature=0, max_tokens=None), GREEDY])
    assert [(len(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in out] == [(70, "length"), (64, "length")]
    assert out[1].outputs[0].token_ids == cases[0][1]


def rss() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_t28_host_memory_is_what_was_asked_and_does_not_grow(tiny_models: Models) -> None:
    """64 MiB asked; then 200 rounds out and back."""
    asked = 64 << 20
    before = rss()
    llm = engine(tiny_models, 1024, page=16, host=asked / (1 << 30))
    pool = llm.engine.host_pool
    assert pool is not None
    size = pool.data.untyped_storage().nbytes()
    assert 0.95 * asked < size <= asked
    assert rss() - before <= 1.05 * asked + (2 << 20)  # the device pool and the engine's tables are small here
    llm.engine.add_request("a", list(range(100)), SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))

    def rounds(count: int) -> None:
        for _ in range(count):
            llm.engine.scheduler.swap(int(llm.engine.scheduler.movable()[0]))
            llm.engine.scheduler.memory.resume(idle=True)
            llm.engine.scheduler.schedule()

    while not llm.stats()["num_emitted_tokens"]:
        llm.engine.step()
    rounds(20)
    before = rss()
    rounds(200)
    assert llm.stats()["restored_tokens"] >= 220 * 100
    grown = rss() - before
    print(f"asked {asked / 2**20:.0f} MiB, took {size / 2**20:.2f}; 200 rounds grew RSS by {grown / 2**20:.2f} MiB")
    assert grown < 5 << 20
    llm.engine.abort("a")
    assert_idle(llm)


# -- abort -----------------------------------------------------------------------------------------------------------


def swap(llm: LLM, name: str) -> None:
    scheduler = llm.engine.scheduler
    slot = next(r.slot for r in scheduler.requests if r is not None and r.request_id == name)
    assert scheduler.swap(slot)


def states(llm: LLM) -> dict[str, Callable[[], None]]:
    """What brings request "a", which runs, into each state. Copies never end by themselves here."""
    memory = llm.engine.scheduler.memory

    def land() -> None:
        for t in memory.transfers._pending:
            t.handle["left"] = 0
        memory.poll()

    def swapped() -> None:
        swap(llm, "a")
        land()
        assert memory.swapper.queue[0].ready

    def swapping_in() -> None:
        swapped()
        memory.resume(idle=True)
        assert not memory.swapper.queue
        assert len(memory.swapper) == 1

    return {"running": lambda: None, "swapping out": lambda: swap(llm, "a"), "swapped": swapped, "swapping in": swapping_in}


@pytest.mark.parametrize("state", ["waiting", "running", "swapping out", "swapped", "swapping in"])
@pytest.mark.parametrize("k", [0, 4])
def test_t45_abort_gives_the_partial_output_and_frees_everything(k: int, state: str, tiny_models: Models,
                                                                 tiny_cases: Cases) -> None:
    """After 20 greedy tokens: ids, log probabilities, "abort". Prompt and partial output resubmitted: the whole is the same."""
    prompt, wanted = tiny_cases["qwen3"][0]
    llm = engine(tiny_models, 512, k=k)
    params = SamplingParams(temperature=0, max_tokens=64, logprobs=1)
    llm.engine.add_request("a", prompt, params, stream=True)
    with use_copier(llm, lambda inner: LateCopier(inner, lambda: 10**6)):
        if state != "waiting":
            seen = 0
            while seen < 20:
                seen = max((len(o.outputs[0].token_ids) for o in llm.engine.step()), default=seen)
            states(llm)[state]()
            check_integrity(llm)
        out = llm.engine.abort("a")
        check_integrity(llm)
        assert out is not None
        c = out.outputs[0]
        assert c.finish_reason == "abort"
        assert c.logprobs is not None
        assert len(c.logprobs) == len(c.token_ids)
        assert len(c.token_ids) >= 20 or state == "waiting"
        assert c.token_ids == wanted[:len(c.token_ids)]
        poison_free_pages(llm)
        for t in llm.engine.scheduler.memory.transfers._pending:
            t.handle["left"] = 0
        assert_idle(llm)
    assert llm.engine.abort("a") is None
    rest = serve(llm, [prompt + c.token_ids], SamplingParams(temperature=0, max_tokens=64 - len(c.token_ids)))
    assert c.token_ids + rest[0].outputs[0].token_ids == wanted
    if state == "running":
        assert rest[0].num_cached_tokens > len(prompt)


# -- faults ----------------------------------------------------------------------------------------------------------


def pressed(models: Models, wrap: Callable[[Copier], Copier], **settings: Any) -> tuple[LLM, list[list[int]], list[list[int]]]:
    """(engine, outputs, what a big pool gives): twelve requests in a pool for three, freed pages poisoned after every step."""
    prompts = [p[:24] for p in tiny_prompts(12, seed=4)]
    wanted = token_ids(serve(engine(models, 4096), prompts, GREEDY))
    llm = engine(models, 264, **settings)
    with use_copier(llm, wrap):
        out = serve(llm, prompts, GREEDY, arrivals=[i // 3 for i in range(12)], after_step=poison_free_pages)
    assert llm.stats()["num_preemptions"] > 0
    return llm, token_ids(out), wanted


@pytest.mark.parametrize("k", [0, 4])
def test_copies_that_end_up_to_five_steps_late_read_their_source_only_then(k: int, tiny_models: Models) -> None:
    rng = random.Random(k)
    llm, out, wanted = pressed(tiny_models, lambda inner: LateCopier(inner, lambda: rng.randint(0, 5)), k=k)
    assert out == wanted
    assert llm.stats()["num_recomputed_tokens"] == 0


@pytest.mark.parametrize("side", [Side.DEVICE, Side.HOST])
def test_the_request_of_a_failed_copy_is_computed_again(side: Side, tiny_models: Models) -> None:
    rng = random.Random(0)
    fail = lambda inner: FailingCopier(inner, lambda src: src is side and rng.random() < 0.5)  # noqa: E731
    llm, out, wanted = pressed(tiny_models, fail, enable_prefix_caching=False)
    assert out == wanted
    assert llm.stats()["failed_copies"] > 0
    assert llm.stats()["num_recomputed_tokens"] > 0


def test_a_host_pool_that_is_too_small_for_one_request_leaves_recomputation(tiny_models: Models) -> None:
    llm, out, wanted = pressed(tiny_models, lambda inner: inner, host=16 * TOKEN, enable_prefix_caching=False)
    assert out == wanted
    assert llm.stats()["host_pages_total"] == 4
    assert llm.stats()["num_recomputed_tokens"] > 0


def test_host_memory_that_is_not_there_is_a_clear_error(tiny_models: Models) -> None:
    with no_host_memory(), pytest.raises(InvalidValueError) as info:
        engine(tiny_models, 512, host=1.0)
    assert info.value.field == "kv_offloading_size"
    assert "made to fail" in str(info.value)
    with pytest.raises(InvalidValueError, match="less than one page"):
        engine(tiny_models, 512, host=1e-9)
    assert engine(tiny_models, 512, host=None).stats()["host_pages_total"] == 0


def test_three_times_the_pool(tiny_models: Models) -> None:
    """Use of the pool, tokens computed twice, order and waits under a load that the pool can not hold."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, 12).tolist() for _ in range(72)]
    params = mixed(72, 60)
    settings: dict[str, Any] = {"max_num_seqs": 72, "page": 1, "enable_prefix_caching": False}
    wanted = token_ids(serve(engine(tiny_models, 8192, **settings), prompts, params))
    llm = engine(tiny_models, 72 * 72 // 3, **settings)
    memory, use, away, longest = llm.engine.scheduler.memory, [], dict[int, int](), 0

    def look(llm: LLM) -> None:
        nonlocal longest
        if memory.swapper.queue:
            use.append(1 - memory.num_free / memory.pages.allocator.num_pages)
        out = {r.slot for r in memory.swapper.queue}
        for slot in list(away):
            if slot not in out:
                longest = max(longest, len(use) - away.pop(slot))
        for slot in out:
            away.setdefault(slot, len(use))

    out = serve(llm, prompts, params, after_step=look)
    stats = llm.stats()
    print(f"pool use {np.mean(use):.4f} over {len(use)} iterations, {stats['offloaded_tokens']} tokens offloaded, "
          f"longest time away {longest} iterations")
    assert np.mean(use) >= 0.97
    assert stats["num_recomputed_tokens"] == 0
    assert stats["offloaded_tokens"] == stats["restored_tokens"] > 0
    assert longest < 300
    for i, (found, ids) in enumerate(zip(token_ids(out), wanted, strict=True)):
        assert len(found) == 60
        if i % 4 < 3:
            assert found == ids


def test_a_swapped_request_goes_on_where_it_was(tiny_models: Models, tiny_cases: Cases) -> None:
    """Back on the device it drafts from its old selection: no prefill, no full round first."""
    prompt, wanted = tiny_cases["qwen3"][1]
    llm = engine(tiny_models, 512)
    llm.engine.add_request("a", prompt, GREEDY)
    while llm.stats()["num_emitted_tokens"] < 10:
        llm.engine.step()
    scheduler = llm.engine.scheduler
    slot = int(scheduler.movable()[0])
    computed = int(scheduler.computed[slot])
    positions = llm.engine.runner.selection.positions[slot].clone()
    force_preemption(llm, "a")
    assert llm.stats()["swapped"] == 1
    assert llm.stats()["device_pages_free"] == llm.stats()["device_pages_total"]
    poison_free_pages(llm)
    plan = scheduler.schedule()
    assert plan is not None
    assert (plan.slots.tolist(), plan.sparse.tolist(), plan.starts.tolist()) == ([slot], [True], [computed])
    assert (llm.engine.runner.selection.positions[slot] == positions).all()
    scheduler.commit(plan, llm.engine.runner.execute(plan))
    done: list[RequestOutput] = []
    while not done:
        done = llm.engine.step()
    assert done[0].outputs[0].token_ids == wanted
