"""Structured output under speculation, on small vocabularies: case T39, and all that drafts could spoil."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from bytelevel import EOS, VOCAB, byte_tokenizer, with_tokenizer
from driving import assert_idle, completions, serve, speculate
from sparsespec import LLM, CompletionOutput, SamplingParams
from sparsespec.config.engine import LoadConfig
from sparsespec.loader import load_model
from sparsespec.loader.loaded import LoadedModel
from sparsespec.testing import Wanted, force_preemption, override_drafts, running_requests, scripted, step, tiny_qwen3

pytestmark = pytest.mark.usefixtures("one_thread")

K = 8
MARKER = "</think>"
GRAMMAR = 'root ::= "{\\"a\\":" [0-9]+ "}"'
VALID = re.compile(r'\{"a":[0-9]+\}')
OFFSETS = range(2 * K + 3)
AT = 40  # position of the marker's first byte in T39
THINK, K_END, BRACE_END, X_END = 257, 262, 258, 259  # see bytelevel.EXTRA
JUNK = [ord("{"), EOS, 261, BRACE_END, ord("x"), THINK, 287]

Override = Callable[[str, int], int | None]
OVERRIDES: dict[str, Override] = {
    "own drafts": lambda request_id, position: None,
    "junk": lambda request_id, position: JUNK[position % len(JUNK)],
    "a second brace": lambda request_id, position: ord("{"),
    "end of text": lambda request_id, position: EOS,
    "marker": lambda request_id, position: THINK,
}
SLOW_OVERRIDES = [name if name in ("own drafts", "junk") else pytest.param(name, marks=pytest.mark.slow) for name in OVERRIDES]


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **settings)


def after_thinking(**settings: Any) -> SamplingParams:
    return greedy(structured_outputs={"grammar": GRAMMAR}, reasoning_end_str=MARKER, **settings)


def thinker(ending: list[int]) -> Callable[[int, int], Wanted]:
    """Thinks of t until the marker's place, writes it as `ending`, and then wants JSON with each brace twice and text after it."""
    follows: dict[int, Wanted] = {
        ord(">"): ord("{"), THINK: ord("{"), K_END: ord("{"), X_END: ord("{"), BRACE_END: ord("{"), ord("{"): ord("{"),
        ord('"'): ord("a"), ord("a"): ord('"'), ord(":"): (ord("-"), ord("1")), ord("1"): ord("7"), ord("}"): ord("}")}

    def script(token: int, position: int) -> Wanted:
        if position < AT:
            return ord("t")
        if position < AT + len(ending):
            return ending[position - AT]
        if token == ord("7"):
            return ord("}") if position > AT + len(ending) + 12 else ord("7")
        return follows.get(token, ord("x"))
    return script


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("override", SLOW_OVERRIDES)
@pytest.mark.parametrize("ending", [bytes_of(MARKER), [THINK], [*bytes_of("</thin"), K_END], [*bytes_of("</think"), BRACE_END]],
                         ids=["bytes", "one token", "several", "with a brace"])
def test_t39_thinking_ends_anywhere_in_a_block(ending: list[int], override: str) -> None:
    """The marker begins at each place of the first two blocks; drafts break the grammar before it and after it."""
    prompts = [[ord("p")] * (AT - offset) for offset in OFFSETS]
    loaded = scripted(thinker(ending), VOCAB, tokenizer=byte_tokenizer(), eos_token_ids=[EOS])
    found = []
    for k in (0, K):
        llm = LLM(loaded, kv_cache_tokens=4096, max_model_len=128, speculative_config=speculate(k))
        with override_drafts(llm, OVERRIDES[override]):
            found.append(completions(serve(llm, prompts, after_thinking(max_tokens=60), [o % 3 for o in OFFSETS])))
    for offset, plain, drafted in zip(OFFSETS, *found, strict=True):
        assert drafted.token_ids == plain.token_ids
        assert (drafted.text, drafted.finish_reason) == (plain.text, "stop")
        thought, content = plain.text.split(MARKER)
        assert thought == "t" * offset
        assert VALID.fullmatch(content)
        assert json.loads(content)["a"] == int("1" + "7" * (len(content) - 7))
    assert override != "own drafts" or llm.stats()["num_accepted_tokens"] > 0


def test_a_token_may_not_end_thinking_with_text_against_the_grammar() -> None:
    """The model wants to close with '>x', whose x no JSON begins with: that token is forbidden, '>' alone is not."""
    script = thinker(bytes_of("</think"))

    def closes_with_x(token: int, position: int) -> Wanted:
        return (X_END, ord(">")) if token == ord("k") else script(token, position)

    loaded = scripted(closes_with_x, VOCAB, tokenizer=byte_tokenizer(), eos_token_ids=[EOS])
    prompt = [ord("p")] * (AT - 9)
    for k in (0, K):
        llm = LLM(loaded, kv_cache_tokens=2048, max_model_len=128, speculative_config=speculate(k))
        with override_drafts(llm, lambda request_id, position: X_END if position % 3 else None):
            free = completions(serve(llm, [prompt], greedy(max_tokens=17, logit_bias={X_END: 1})))[0]
            c = completions(serve(llm, [prompt], after_thinking(max_tokens=60, logit_bias={X_END: 1})))[0]
        assert free.token_ids[-1] == X_END
        assert re.fullmatch(r't{9}</think>\{"a":[0-9]+\}', c.text)


@pytest.fixture(scope="module")
def random_model() -> LoadedModel:
    """Random weights, which know nothing of JSON, over the byte-level vocabulary."""
    path = str(tiny_qwen3(3, vocab_size=VOCAB, max_position_embeddings=512))
    return with_tokenizer(load_model(LoadConfig(model=path, skip_tokenizer_init=True, device="cpu")))


def engine(model: LoadedModel, k: int, **settings: Any) -> LLM:
    return LLM(model, max_model_len=256, speculative_config=speculate(k, 0.3), **{"kv_cache_tokens": 8192, **settings})


PROMPTS = [bytes_of(f"prompt {i}: " + "ab c" * (i % 5 + 1)) for i in range(10)]


def limited(offset: int, **settings: Any) -> SamplingParams:
    """The grammar after a thinking budget of `offset` tokens."""
    return SamplingParams(structured_outputs={"grammar": 'root ::= "{\\"a\\":" [0-9]{1,9} "}"'}, reasoning_end_str=MARKER,
                          thinking_token_budget=offset, max_tokens=80, **settings)


@pytest.mark.parametrize(("settings", "override"), [
    ({"temperature": 0}, "junk"), ({"temperature": 1.0, "seed": 5}, "own drafts"),
    pytest.param({"temperature": 0}, "own drafts", marks=pytest.mark.slow),
    pytest.param({"temperature": 1.0, "seed": 5}, "junk", marks=pytest.mark.slow),
    pytest.param({"temperature": 0.7, "seed": 6, "top_p": 0.9}, "own drafts", marks=pytest.mark.slow)])
def test_random_weights_with_a_budget_at_each_offset(random_model: LoadedModel, settings: dict[str, Any], override: str) -> None:
    params = [limited(offset, **settings) for offset in OFFSETS]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in OFFSETS]
    plain = completions(serve(engine(random_model, 0), prompts, params))
    llm = engine(random_model, K)
    with override_drafts(llm, OVERRIDES[override]):
        drafted = completions(serve(llm, prompts, params, [i % 4 for i in OFFSETS]))
    for offset, a, b in zip(OFFSETS, plain, drafted, strict=True):
        assert a.token_ids == b.token_ids
        assert (b.finish_reason, b.token_ids[-1]) == ("stop", EOS)
        assert MARKER in random_model.tokenizer.decode(b.token_ids[:offset + len(MARKER)])
        assert VALID.fullmatch(b.text.split(MARKER)[1])
    assert override == "junk" or llm.stats()["num_accepted_tokens"] > 0


def test_a_budget_without_a_grammar(random_model: LoadedModel) -> None:
    """The marker comes after exactly so many tokens, and the text goes on freely after it."""
    params = [SamplingParams(temperature=0, reasoning_end_str=MARKER, thinking_token_budget=n, max_tokens=40, ignore_eos=True)
              for n in (0, 1, 5, 13)]
    free = completions(serve(engine(random_model, 0), PROMPTS[:4], greedy(max_tokens=40, ignore_eos=True)))
    plain, drafted = (completions(serve(engine(random_model, k), PROMPTS[:4], params)) for k in (0, K))
    for budget, a, b, c in zip((0, 1, 5, 13), plain, drafted, free, strict=True):
        assert a.token_ids == b.token_ids
        assert b.token_ids[:budget] == c.token_ids[:budget]
        assert b.token_ids[budget:budget + len(MARKER)] == bytes_of(MARKER)
        assert len(b.token_ids) == 40


def test_neighbours_and_completions_of_one_prompt(random_model: LoadedModel) -> None:
    """One batch holds grammars, budgets and free requests; each output is what it is alone. Three completions have a state each."""
    kinds = [limited(7, temperature=0), SamplingParams(temperature=1, seed=1, max_tokens=30), greedy(max_tokens=30, logprobs=2),
             SamplingParams(temperature=1, seed=2, n=3, max_tokens=20, structured_outputs={"regex": "[a-f]{3,15}"}),
             greedy(max_tokens=30, structured_outputs={"choice": ["no", "nobody"]})]
    alone = [serve(engine(random_model, 0), [p], k)[0].outputs for p, k in zip(PROMPTS, kinds, strict=False)]
    together = [o.outputs for o in serve(engine(random_model, K, max_num_seqs=5), PROMPTS[:5], kinds, [0, 2, 4, 1, 3])]
    for a, b in zip(alone, together, strict=True):
        assert [c.token_ids for c in a] == [c.token_ids for c in b]
    assert len({c.text for c in together[3]}) == 3
    assert all(re.fullmatch("[a-f]{3,15}", c.text) for c in together[3])
    assert together[4][0].text in ("no", "nobody")


def test_preemption_and_abort_in_the_middle(random_model: LoadedModel) -> None:
    params = [limited(n, temperature=0) for n in (3, 9)]
    wanted = completions(serve(engine(random_model, 0), PROMPTS[:2], params))
    for when in range(2, 14, 2):
        llm = engine(random_model, K)
        for name, prompt, p in zip("ab", PROMPTS, params, strict=False):
            llm.engine.add_request(name, prompt, p)
        llm.engine.add_request("gone", PROMPTS[2], params[0])
        done: dict[str, CompletionOutput] = {}
        for now in range(200):
            done.update((o.request_id, o.outputs[0]) for o in step(llm))
            if now == when:
                for name in set(running_requests(llm)) & {"a", "b"}:
                    force_preemption(llm, name)
                llm.engine.abort("gone")
        assert [done[n].token_ids for n in "ab"] == [c.token_ids for c in wanted]
        assert_idle(llm)


def test_other_settings_stay_inside_the_grammar(random_model: LoadedModel) -> None:
    """min_tokens holds EOS back where the grammar can go on; ids and words are left out of it; where nothing is left it wins."""
    digits = {"regex": "[0-9]+"}
    cases: list[tuple[SamplingParams, str]] = [
        (greedy(max_tokens=30, min_tokens=12, structured_outputs={"regex": "[0-9]{1,20}"}), r"[0-9]{12,20}"),
        (greedy(max_tokens=30, structured_outputs={"regex": "[0-9]{1,3}"}, min_tokens=9), r"[0-9]{3}"),
        (greedy(max_tokens=12, structured_outputs={"regex": "[0-9]{2}"}, ignore_eos=True), r"[0-9]{2}"),
        (greedy(max_tokens=12, structured_outputs={"regex": "[0-9]{5}"}, allowed_token_ids=bytes_of("2x")), r"2{5}"),
        (greedy(max_tokens=12, structured_outputs={"regex": "[0-9]{5}"}, allowed_token_ids=bytes_of("xyz")), r"[0-9]{5}"),
        (greedy(max_tokens=12, structured_outputs={"regex": "a[0-9]{3}"}, bad_words=["a"]), r"a[0-9]{3}"),
        (greedy(max_tokens=12, structured_outputs={"regex": "[0-9]{5}"}, logit_bias={ord("3"): 100, ord("x"): 100}), r"3{5}"),
        (greedy(max_tokens=30, structured_outputs=digits, stop_token_ids=[ord("5")], logit_bias={ord("5"): 8}), r"[0-46-9]*"),
        (greedy(max_tokens=30, structured_outputs=digits, stop=["77"], logit_bias={ord("7"): 9}), r"[0-689]*(7[0-689]+)*"),
        (SamplingParams(temperature=1, seed=1, max_tokens=30, presence_penalty=2, repetition_penalty=1.5,
                        structured_outputs={"regex": "[0-9]{9}"}), r"[0-9]{9}"),
    ]
    params = [p for p, _ in cases]
    plain, drafted = (completions(serve(engine(random_model, k), PROMPTS, params)) for k in (0, K))
    for (_, wanted), a, b in zip(cases, plain, drafted, strict=True):
        assert a.token_ids == b.token_ids
        assert re.fullmatch(wanted, b.text), (wanted, b.text)
    assert drafted[1].token_ids[3:] == [EOS] * 6  # what min_tokens asks for beyond the grammar is its end, repeated
    assert drafted[2].token_ids[2:] == [EOS] * 10
    assert (drafted[2].finish_reason, drafted[1].finish_reason) == ("length", "stop")


def test_logprobs(random_model: LoadedModel) -> None:
    """Raw ones are the model's own, processed ones those of the grammar's tokens; all finite and at most 0."""
    params = greedy(max_tokens=10, logprobs=5, structured_outputs={"regex": "[ab]{4}"})
    raw, processed = (completions(serve(engine(random_model, K, logprobs_mode=mode), PROMPTS[:1], params))[0]
                      for mode in ("raw_logprobs", "processed_logprobs"))
    assert raw.token_ids == processed.token_ids
    assert raw.logprobs is not None
    assert processed.logprobs is not None
    assert any(set(row) - set(bytes_of("ab")) - {EOS} for row in raw.logprobs)
    for position, (a, b) in enumerate(zip(raw.logprobs, processed.logprobs, strict=True)):
        assert all(-9999 <= p.logprob <= 0 for p in [*a.values(), *b.values()])
        likely = {token for token, p in b.items() if p.logprob > -9999}
        assert likely == (set(bytes_of("ab")) if position < 4 else {EOS})
        assert sum(2.718281828459045 ** p.logprob for p in b.values()) == pytest.approx(1, abs=1e-4)
