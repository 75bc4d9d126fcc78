"""Verification modes: case T33. Results that come late change nothing but the time at which they come.

Whatever happens while a step is under way (arrivals, ends, aborts, preemption, copies, NaN), each request's output is what it
is without any overlap, and no page is used by two. Free pages hold NaN before every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytelevel import EOS, VOCAB, byte_tokenizer
from driving import assert_idle, completions, serve, speculate, token_ids
from policies import POLICIES, configure, per_request, target
from reference import tiny_prompts
from sparsespec import LLM, RequestOutput, SamplingParams
from sparsespec.loader.loaded import LoadedModel
from sparsespec.testing import (
    LateCopier,
    Wanted,
    check_integrity,
    force_preemption,
    override_drafts,
    poison_free_pages,
    running_requests,
    scripted,
    use_copier,
)

Models = dict[str, LoadedModel]
Case = tuple[list[int], list[int]]
pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ("sync", "delayed", "device")
LATE = MODES[1:]
ARRIVALS = [0, 0, 1, 5, 6, 13, 14, 30]
SCHEDULES = ("unified", "lockstep")


def engine(loaded: LoadedModel, verification: str, k: int = 4, ratio: float = 0.3, spec: dict[str, Any] | None = None,
           **settings: Any) -> LLM:
    config = speculate(k, ratio) | {"verification": verification, **(spec or {})}
    return LLM(loaded, **{"kv_cache_tokens": 4096, "max_model_len": 256, "page_size": 4, "speculative_config": config, **settings})


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **settings)


def in_every_mode(run: Callable[[str], Any]) -> None:
    """`run(mode)` gives the same in all three."""
    first, *others = (run(mode) for mode in MODES)
    for mode, other in zip(LATE, others, strict=True):
        assert other == first, mode


def ends(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], str, str | None, Any]]:
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in completions(outputs)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_t33_greedy_output_is_the_models_own(kind: str, k: int, schedule: str, tiny_models: Models,
                                             tiny_cases: dict[str, list[Case]]) -> None:
    """Ends by length at any place of a round, and by a stop id in the middle of one."""
    cases = tiny_cases[kind]
    params, wanted = [], []
    for i, (_, ids) in enumerate(cases):
        stop = ids[20 + i]
        count = ids.index(stop) + 1 if i % 2 else 41 + i
        params.append(greedy(max_tokens=41 + i, stop_token_ids=[stop] if i % 2 else None))
        wanted.append(ids[:count])
    stalled = {}
    for mode in MODES:
        llm = engine(tiny_models[kind], mode, k, spec={"schedule": schedule}, max_num_seqs=6)
        out = serve(llm, [p for p, _ in cases], params, ARRIVALS, poison_free_pages)
        assert token_ids(out) == wanted, mode
        assert [c.finish_reason for c in completions(out)] == ["length", "stop"] * 4
        stalled[mode] = llm.stats()["num_stalled_slots"]
    assert stalled["sync"] == stalled["device"] == 0 < stalled["delayed"]


@pytest.mark.parametrize("mode", LATE)
def test_t33_smollm2(mode: str, smol: LoadedModel) -> None:
    prompts = [smol.tokenizer.encode(t) for t in ("The three primary colours are", "def fibonacci(n):", "Once upon a time")]
    outputs = []
    for verification in ("sync", mode):
        llm = LLM(smol, kv_cache_tokens=2048, max_model_len=256, speculative_config=speculate(4, 0.1, verification=verification))
        outputs.append(ends(serve(llm, prompts, greedy(max_tokens=33, stop=["\n\n"]), [0, 1, 7])))
    assert outputs[0] == outputs[1]
    assert sum(len(o[0]) for o in outputs[0]) > 30


def test_seeded_and_logprobs(tiny_models: Models) -> None:
    """Seeded samples, penalties, log probabilities of output and prompt."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, n).tolist() for n in (5, 40, 90, 17)]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=37 + i, repetition_penalty=1.2 if i % 2 else 1.0, logprobs=2,
                             prompt_logprobs=1 if i == 2 else None) for i in range(4)]

    def run(mode: str) -> Any:
        out = serve(engine(tiny_models["qwen3"], mode, max_num_batched_tokens=32), prompts, params, [0, 2, 3, 9], poison_free_pages)
        return [(c.token_ids, [sorted(d) for d in c.logprobs or []], c.cumulative_logprob, len(o.prompt_logprobs or []))
                for o, c in zip(out, completions(out), strict=True)]

    first, *others = (run(mode) for mode in MODES)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert (a[0], a[1], a[3]) == (b[0], b[1], b[3])
            assert a[2] == pytest.approx(b[2], abs=1e-3)


@pytest.mark.parametrize("stop", ["cd", "e", "xyz"])
def test_stop_strings_end_anywhere_in_a_round(stop: str) -> None:
    def script(token: int, position: int) -> Wanted:
        return ord("a") + position % 26

    loaded = scripted(script, VOCAB, tokenizer=byte_tokenizer(), eos_token_ids=[EOS])

    def run(mode: str) -> Any:
        llm = engine(loaded, mode, 8, max_model_len=128)
        prompts = [[ord("p")] * n for n in range(20, 46)]
        return ends(serve(llm, prompts, greedy(max_tokens=60, stop=[stop]), [n % 5 for n in range(26)]))

    in_every_mode(run)


def test_a_broken_row_ends_its_request_alone(tiny_models: Models) -> None:
    """NaN comes at every place of a round; the step that is under way then is thrown away."""
    def script(token: int, position: int) -> Wanted:
        return None if token == 255 else (token + 1) % 256

    def run(mode: str) -> Any:
        llm = engine(scripted(script), mode, 8)
        prompts = [[3, 100], *([3, 255 - n] for n in range(20)), [3, 150]]
        done: dict[str, RequestOutput] = {}
        for i, prompt in enumerate(prompts):
            llm.engine.add_request(str(i), prompt, greedy(max_tokens=60))
        while llm.engine.has_work():
            done.update((o.request_id, o) for o in llm.engine.step())
            check_integrity(llm)
        assert_idle(llm)
        return [(done[str(i)].outputs[0].token_ids, done[str(i)].outputs[0].finish_reason, str(done[str(i)].error))
                for i in range(len(prompts))]

    in_every_mode(run)


@pytest.mark.parametrize("mode", LATE)
def test_aborts_at_every_step(mode: str, tiny_models: Models, tiny_cases: dict[str, list[Case]]) -> None:
    """In each of 40 runs one request of four is aborted after another number of steps, and a new one takes its place at once."""
    cases = tiny_cases["llama"]
    llm = engine(tiny_models["llama"], mode, max_num_seqs=4, kv_cache_tokens=1024, max_num_batched_tokens=24)
    for steps in range(40):
        for i in range(4):
            llm.engine.add_request(f"{i}", cases[i][0], greedy(max_tokens=21 + i))
        done: dict[str, RequestOutput] = {}
        for step in range(300):
            if step == steps:
                out = llm.engine.abort("2")
                if out is not None:
                    ids = out.outputs[0].token_ids
                    assert ids == cases[2][1][:len(ids)]
                    check_integrity(llm)
                llm.engine.add_request("new", cases[5][0], greedy(max_tokens=9))
            poison_free_pages(llm)
            done.update((o.request_id, o) for o in llm.engine.step())
            check_integrity(llm)
            if step > steps and not llm.engine.has_work():
                break
        assert_idle(llm)
        for name, index, count in (("0", 0, 21), ("1", 1, 22), ("3", 3, 24), ("new", 5, 9)):
            assert done[name].outputs[0].token_ids == cases[index][1][:count], (steps, name)
    assert not llm.engine.has_work()
    llm.engine.add_request("last", cases[0][0], greedy(max_tokens=20))
    for _ in range(4):
        llm.engine.step()
    llm.engine.abort("last")
    llm.reset_prefix_cache()
    llm.sleep()  # needs an idle engine: waits for what is under way
    llm.wake_up()
    assert_idle(llm)


@pytest.mark.parametrize("mode", LATE)
def test_prefix_caching(mode: str, tiny_models: Models, tiny_cases: dict[str, list[Case]]) -> None:
    """The same prompts and their continuations again and again, in a pool that evicts, beside requests that are aborted."""
    cases = tiny_cases["qwen3"]
    llm = engine(tiny_models["qwen3"], mode, kv_cache_tokens=640, kv_offloading_size=2048 * 512 / 2**30, max_num_seqs=4)
    for turn in range(4):
        prompts = [p + ids[:8 * turn] for p, ids in cases]
        out = serve(llm, prompts, greedy(max_tokens=23), ARRIVALS, poison_free_pages)
        assert token_ids(out) == [ids[8 * turn:8 * turn + 23] for _, ids in cases]
        llm.engine.add_request("gone", prompts[0] + [1, 2, 3], greedy(max_tokens=20))
        for _ in range(turn + 1):
            llm.engine.step()
        llm.engine.abort("gone")
    assert llm.stats()["num_cached_tokens"] > 500


@pytest.mark.parametrize("delay", [None, 0, 3])
@pytest.mark.parametrize("mode", LATE)
def test_a_tight_pool(mode: str, delay: int | None, tiny_models: Models) -> None:
    """6 requests of 120 tokens in a pool for about two: swapped to the host, by copies that end late, or (None) computed again."""
    prompts = [p[:30] for p in tiny_prompts(16, seed=10) if len(p) >= 30][:6]
    wanted = token_ids(serve(engine(tiny_models["qwen3"], "sync"), prompts, greedy(max_tokens=120)))
    spec = {"kv_policy": "recompute" if delay is None else "offload"}
    llm = engine(tiny_models["qwen3"], mode, 4, spec=spec, kv_cache_tokens=320, enable_prefix_caching=False,
                 kv_offloading_size=None if delay is None else 4096 * 512 / 2**30)
    with use_copier(llm, lambda inner: LateCopier(inner, lambda: delay or 0)):
        out = serve(llm, prompts, greedy(max_tokens=120), ARRIVALS[:6], poison_free_pages)
    assert token_ids(out) == wanted
    stats = llm.stats()
    assert stats["num_preemptions"] > 0
    assert (stats["num_recomputed_tokens"] > 0) is (delay is None)
    assert (stats["restored_tokens"] > 0) is (delay is not None)


@pytest.mark.parametrize("mode", LATE)
def test_preemption_forced_at_random(mode: str, tiny_models: Models, tiny_cases: dict[str, list[Case]]) -> None:
    cases = tiny_cases["qwen2"]
    llm = engine(tiny_models["qwen2"], mode, max_num_batched_tokens=64, kv_offloading_size=4096 * 512 / 2**30)
    rng = np.random.default_rng(0)
    for i, (prompt, _) in enumerate(cases):
        llm.engine.add_request(str(i), prompt, greedy(max_tokens=64))
    done: dict[str, RequestOutput] = {}
    while llm.engine.has_work():
        done.update((o.request_id, o) for o in llm.engine.step())
        if rng.random() < 0.3 and llm.stats()["num_preemptions"] < 40 and (running := sorted(running_requests(llm))):
            force_preemption(llm, str(rng.choice(running)))
    assert llm.stats()["num_preemptions"] >= 15
    assert [done[str(i)].outputs[0].token_ids for i in range(len(cases))] == [ids for _, ids in cases]


@pytest.mark.parametrize("mode", LATE)
def test_adaptive(mode: str, tiny_models: Models, tiny_cases: dict[str, list[Case]]) -> None:
    """As the controller has it, and with lengths that change at every turn."""
    cases = tiny_cases["llama"]
    for spec in ({"adaptive": True}, {"adaptive": False}):
        llm = engine(tiny_models["llama"], mode, 8, spec=spec)
        lengths = cycle([8, 3, 0, 0, 1, 8, 2, 0, 5])
        if not spec["adaptive"]:
            llm.engine.scheduler.draft_length = lambda policy, lengths=lengths: next(lengths)  # type: ignore[misc]
        out = serve(llm, [p for p, _ in cases], greedy(max_tokens=64), ARRIVALS)
        assert token_ids(out) == [ids for _, ids in cases]


@pytest.mark.parametrize("mode", LATE)
def test_a_controller_that_stops_drafting(mode: str, tiny_models: Models, tiny_cases: dict[str, list[Case]]) -> None:
    """It changes its mind every few steps, in the middle of rounds."""
    cases = tiny_cases["llama"]
    llm = engine(tiny_models["llama"], mode, 8)
    controller = llm.engine.controller
    turn = cycle([8] * 5 + [0] * 3 + [2] * 4 + [0])
    controller.observe = lambda *args: setattr(controller, "k", next(turn))  # type: ignore[method-assign]
    out = serve(llm, [p for p, _ in cases], greedy(max_tokens=64), ARRIVALS, poison_free_pages)
    assert token_ids(out) == [ids for _, ids in cases]
    assert llm.stats()["num_draft_tokens"] > 50


@pytest.mark.parametrize("mode", LATE)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy(name: str, mode: str) -> None:
    """Those with a proposer wait for their results in every mode."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 256, n).tolist() for n in (30, 7, 50, 21)]
    outputs = []
    for config in ({"method": "none"}, configure(name, 4, verification=mode)):
        llm = LLM(target(), kv_cache_tokens=2048, max_model_len=256, page_size=4, speculative_config=config)
        outputs.append(token_ids(serve(llm, prompts, greedy(max_tokens=42), [0, 1, 4, 9], poison_free_pages)))
    assert outputs[0] == outputs[1]
    assert llm.stats()["num_draft_tokens"] > 30


@pytest.mark.parametrize("mode", LATE)
def test_policies_of_requests_side_by_side(mode: str) -> None:
    names = ("pillar", "ngram", "window", "hierarchy", "quest", "triforce")
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, 256, 20).tolist() for _ in names]
    plain = LLM(target(), kv_cache_tokens=2048, max_model_len=256, speculative_config={"method": "none"})
    wanted = token_ids(serve(plain, prompts, greedy(max_tokens=42)))
    llm = LLM(target(), kv_cache_tokens=2048, max_model_len=256, speculative_config=configure("pillar", 4, verification=mode))
    params = [greedy(max_tokens=42, speculative_config=per_request(name, 3)) for name in names]
    assert token_ids(serve(llm, prompts, params, [0, 1, 1, 3, 4, 8], poison_free_pages)) == wanted


@pytest.mark.parametrize("junk", [False, True])
def test_structured_output(junk: bool) -> None:
    """A model that would break the grammar at each brace, and drafts that do."""
    follows: dict[int, Wanted] = {ord("{"): ord("{"), ord('"'): ord("a"), ord("a"): ord('"'), ord(":"): (ord("-"), ord("1")),
                                  ord("1"): ord("7"), ord("}"): ord("}")}

    def script(token: int, position: int) -> Wanted:
        if token == ord("7"):
            return ord("}") if position % 16 == 0 else ord("7")
        return follows.get(token, ord("{"))

    loaded = scripted(script, VOCAB, tokenizer=byte_tokenizer(), eos_token_ids=[EOS])
    params = greedy(max_tokens=60, structured_outputs={"grammar": 'root ::= "{\\"a\\":" [0-9]+ "}"'})

    def run(mode: str) -> Any:
        llm = engine(loaded, mode, 8, max_model_len=128)
        with override_drafts(llm, lambda request_id, position: (ord("{"), EOS, ord("x"))[position % 3] if junk else None):
            return ends(serve(llm, [[ord("p")] * n for n in range(10, 27)], params, [n % 7 for n in range(17)]))

    in_every_mode(run)
    for _, text, reason, _ in run("device"):
        assert text.startswith('{"a":1')
        assert text.endswith("}")
        assert reason == "stop"


@settings(max_examples=40, deadline=None)
@given(ops=st.lists(st.one_of(
    st.tuples(st.just("add"), st.integers(0, 7), st.integers(1, 40)), st.tuples(st.just("step"), st.integers(1, 9), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)), st.tuples(st.just("preempt"), st.integers(0, 30), st.just(0))),
    min_size=5, max_size=40), mode=st.sampled_from(LATE), k=st.sampled_from([1, 4, 8]), tight=st.booleans(),
    schedule=st.sampled_from(SCHEDULES))
def test_any_order_of_events(ops: list[tuple[str, int, int]], mode: str, k: int, tight: bool, schedule: str, tiny_models: Models,
                             tiny_cases: dict[str, list[Case]]) -> None:
    """Arrivals, aborts, preemptions and steps as they come; every output is a beginning of what the model says, and complete
    unless it was aborted."""
    cases = tiny_cases["qwen3"]
    llm = engine(tiny_models["qwen3"], mode, k, spec={"schedule": schedule}, max_num_seqs=4,
                 kv_cache_tokens=256 if tight else 2048, kv_offloading_size=2048 * 512 / 2**30)
    added: dict[str, tuple[int, int]] = {}
    done: dict[str, RequestOutput] = {}

    def step() -> None:
        poison_free_pages(llm)
        done.update((o.request_id, o) for o in llm.engine.step())
        check_integrity(llm)

    for kind, value, tokens in [*ops, ("step", 1, 0)]:
        if kind == "add":
            name = str(len(added))
            added[name] = value, tokens
            llm.engine.add_request(name, cases[value][0], greedy(max_tokens=tokens))
        elif kind == "abort" and str(value) in added:
            out = llm.engine.abort(str(value))
            if out is not None:
                done[str(value)] = out
            check_integrity(llm)
        elif kind == "preempt" and (running := sorted(running_requests(llm))):
            force_preemption(llm, running[value % len(running)])
            check_integrity(llm)
        for _ in range(value if kind == "step" else 0):
            step()
    for _ in range(3000):
        if not llm.engine.has_work():
            break
        step()
    assert_idle(llm)
    assert done.keys() == added.keys()
    for name, (index, tokens) in added.items():
        c = done[name].outputs[0]
        assert c.token_ids == cases[index][1][:len(c.token_ids)]
        assert c.finish_reason == "abort" or len(c.token_ids) == tokens
