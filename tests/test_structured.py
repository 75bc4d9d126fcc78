"""Structured output: kinds, schemas, refusals, distributions, and the state that follows a text with its drafts."""

from __future__ import annotations

import builtins
import json
import os
import random
import re
import socket
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bytelevel import EOS, EXTRA, VOCAB, byte_tokenizer, with_tokenizer
from driving import assert_idle, completions, serve, speculate
from sparsespec import LLM, SamplingParams
from sparsespec.config.engine import LoadConfig
from sparsespec.core.errors import InvalidValueError, UnknownFieldError, UnsupportedError
from sparsespec.core.structured_outputs import MAX_SOURCE, StructuredOutputsParams
from sparsespec.loader import load_model
from sparsespec.loader.loaded import LoadedModel
from sparsespec.sampling.constraint import Constraints, Follower, unpack, words
from sparsespec.sampling.grammar import Constraint, ConstraintCompiler
from sparsespec.sampling.trial import Bounds, try_grammar
from sparsespec.testing import tiny_qwen3
from stat_utils import SOUND, chi_square

pytestmark = pytest.mark.usefixtures("one_thread")

MARKER = "</think>"


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(byte_tokenizer(), VOCAB, [EOS])


def compiled(compiler: ConstraintCompiler, **settings: Any) -> Constraint:
    constraint = compiler.compile(SamplingParams(**settings))
    assert constraint is not None
    return constraint


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the output may be this text."""
    follower = Follower(constraint, 0, {EOS})
    mask = torch.full((words(VOCAB),), -1, dtype=torch.int32)
    for i, byte in enumerate([*text.encode(), EOS]):
        mask.fill_(-1)
        follower.mask(mask)
        if not unpack(mask[None], VOCAB)[0, byte]:
            return False
        follower.move(i, [byte])
    return True


@pytest.mark.parametrize(("wanted", "good", "bad"), [
    ({"regex": "[0-9]{2}(a|bc)?"}, ["12", "12bc"], ["1", "12b", "123", ""]),
    ({"choice": ["yes", 'no "way"\n\\', "é😀"]}, ["yes", 'no "way"\n\\', "é😀"], ["y", "yesyes", "no", "é"]),
    ({"grammar": 'root ::= "a" x\nx ::= "b" x | "c"'}, ["ac", "abbc"], ["a", "abb"]),
    ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}', '{ "a":1 }'], ["[]", "1", "{"]),
    ({"json": {}}, ["1", "[true]", '"x"'], ["x", "[1"]),
    ({"json": '{"enum": ["a", 3]}'}, ['"a"', "3"], ["a", "4"]),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "string", "enum": ["x"]}], "title": "t"}}, ['"x"', "3"], ['"y"', "null"]),
    ({"json": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]}},
     ['{"a":3}', '{ "a" : 10 }'], ['{"a":2}', "{}", '{"a":3,"b":1}']),
    ({"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "disable_any_whitespace": True},
     ["[]", "[true, false]"], ["[true,false]", "[ true]", "[true, true, true]"]),
    ({"json": {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}},
     ["{}", '{"n":{"n":{}}}'], ['{"n":1}']),
])
def test_kinds(compiler: ConstraintCompiler, wanted: dict[str, Any], good: list[str], bad: list[str]) -> None:
    constraint = compiled(compiler, structured_outputs=wanted)
    assert [accepts(constraint, t) for t in good] == [True] * len(good)
    assert [accepts(constraint, t) for t in bad] == [False] * len(bad)


def test_tokens_are_not_text_where_they_are_special(compiler: ConstraintCompiler) -> None:
    """EOS has the text <eos>, which a grammar may hold; but the token itself only ends."""
    follower = Follower(compiled(compiler, structured_outputs={"regex": "<eos>"}), 0, {EOS})
    mask = torch.zeros(words(VOCAB), dtype=torch.int32)
    assert follower.mask(mask)
    assert unpack(mask[None], VOCAB)[0].nonzero().flatten().tolist() == [ord("<")]


@pytest.mark.parametrize(("wanted", "error", "field"), [
    ({}, InvalidValueError, "structured_outputs"),
    ({"regex": "a", "choice": ["b"]}, InvalidValueError, "structured_outputs"),
    ({"json_object": False}, InvalidValueError, "structured_outputs"),
    ({"json_object": "yes"}, InvalidValueError, "structured_outputs.json_object"),
    ({"regexp": "a"}, UnknownFieldError, "structured_outputs.regexp"),
    ("[0-9]", InvalidValueError, "structured_outputs"),
    ({"regex": 3}, InvalidValueError, "structured_outputs.regex"),
    ({"regex": ""}, InvalidValueError, "structured_outputs.regex"),
    ({"grammar": ""}, InvalidValueError, "structured_outputs.grammar"),
    ({"choice": []}, InvalidValueError, "structured_outputs.choice"),
    ({"choice": "yes"}, InvalidValueError, "structured_outputs.choice"),
    ({"choice": ["a", 3]}, InvalidValueError, "structured_outputs.choice"),
    ({"json": {}, "whitespace_pattern": " *"}, UnsupportedError, "structured_outputs.whitespace_pattern"),
    ({"json": {}, "disable_any_whitespace": 1}, InvalidValueError, "structured_outputs.disable_any_whitespace"),
    ({"json": {"enum": [{1, 2}]}}, InvalidValueError, "structured_outputs.json"),
    ({"regex": "a" * (MAX_SOURCE + 1)}, InvalidValueError, "structured_outputs.regex"),
])
def test_refused_on_construction(wanted: Any, error: type[Exception], field: str) -> None:
    with pytest.raises(error) as e:
        SamplingParams(structured_outputs=wanted)
    assert e.value.field == field  # type: ignore[attr-defined]


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(("wanted", "where"), [
    ({"regex": "[0-9"}, "regex"), ({"regex": r"(a)\1"}, "regex"), ({"regex": "(?=a)b"}, "regex"), ({"regex": "\ud800"}, "regex"),
    ({"grammar": "root ::= x"}, "grammar"), ({"grammar": 'x ::= "a"'}, "grammar"), ({"grammar": "nonsense"}, "grammar"),
    ({"json": "{"}, "json"), ({"json": "[1]"}, "json"), ({"json": {"type": "foo"}}, "json"), ({"json": {"enum": []}}, "json"),
    ({"json": {"$ref": "#/nowhere"}}, "json"), ({"json": {"$ref": "http://example.com/x"}}, r"json: \$ref"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "json"), ({"json": nested(1000)}, "json"),
    ({"json": {"type": "object", "required": 3}}, "json"),
    ({"json": {"type": "object", "required": ["a"]}}, "json: required"),
    ({"json": {"anyOf": [{"type": "array", "uniqueItems": True}]}}, "json: uniqueItems"),
    ({"json": {"properties": {"a": {"not": {"type": "string"}}}}}, "json: not"),
    ({"json": {"type": "string", "format": "colour"}}, "json: format"),
    ({"json": {"minLength": 2}}, "json: minLength"), ({"json": {"enum": ["a"], "minLength": 2}}, "json: minLength"),
    ({"json": {"type": "integer", "enum": ["a", 3]}}, "json: type"), ({"json": {"type": "integer", "const": True}}, "json: type"),
    ({"json": {"anyOf": [{"type": "integer"}], "type": "string"}}, "json: type"),
    ({"json": {"type": "nothing", "enum": [1]}}, "json"),
    ({"json": {"type": "object", "properties": {"a": {}}, "propertyNames": {"enum": ["b"]}}}, "json: propertyNames"),
    ({"json": {"type": "string", "pattern": "a+", "format": "date"}}, "json: pattern"),
    ({"json": {"type": "string", "pattern": "a+", "maxLength": 3}}, "json"),  # these the library knows it can't do
    ({"json": {"allOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}}, "json"),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}}, "json"),
    ({"json": {"type": "number", "multipleOf": 0.5}}, "json"),
])
def test_refused_at_admission(random_model: LoadedModel, wanted: dict[str, Any], where: str) -> None:
    """What does not compile, and what would be left out without a word. Nothing stays in the engine, and the rest go on."""
    llm = LLM(random_model, kv_cache_tokens=512, max_model_len=64)
    llm.engine.add_request("other", [1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    with pytest.raises(InvalidValueError, match=rf"^structured_outputs\.{where}=") as e:
        llm.engine.add_request("bad", [1, 2, 3], SamplingParams(structured_outputs=wanted))
    assert e.value.remedy
    assert "/project" not in str(e.value)
    assert list(llm.engine.groups) == ["other"]
    while llm.engine.has_work():
        llm.engine.step()
    assert_idle(llm)


@pytest.mark.parametrize("wanted", [
    {"regex": "([a-z0-9]{0,30}[A-Z]?){0,5000}"}, {"regex": "(.?){3}" * 2000},
    {"grammar": "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | ""' for i in range(40)) + "\nr40 ::= [a-z]"},
])
def test_what_would_take_for_ever_is_refused(smol: LoadedModel, wanted: dict[str, Any]) -> None:
    """Small texts that keep a compiler or a matcher busy for minutes; refused within the bound, and again at once."""
    compiler = ConstraintCompiler(smol.tokenizer, smol.config.vocab_size, smol.eos_token_ids)
    compiler.bounds = Bounds(seconds=1)
    compiler.compile(SamplingParams(structured_outputs={"regex": "a"}))
    for limit in (20, 0.5):
        start = time.monotonic()
        with pytest.raises(InvalidValueError, match="to follow"):
            compiler.compile(SamplingParams(structured_outputs=wanted))
        assert time.monotonic() - start < limit


def test_refused_without_a_tokenizer_an_eos_or_xgrammar(random_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(UnsupportedError, match="tokenizer"):
        ConstraintCompiler(None, VOCAB, [EOS]).compile(params)
    with pytest.raises(UnsupportedError, match="EOS"):
        ConstraintCompiler(byte_tokenizer(), VOCAB, []).compile(params)
    with pytest.raises(InvalidValueError, match="reasoning_end_str"):
        SamplingParams(thinking_token_budget=3)
    with pytest.raises(InvalidValueError, match="reasoning_end_str"):
        SamplingParams(reasoning_end_str="")
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "xgrammar":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"sparsespec\[structured\]"):
        ConstraintCompiler(byte_tokenizer(), VOCAB, [EOS]).compile(params)


def test_parameters_may_be_built_beforehand() -> None:
    params = StructuredOutputsParams(choice=["a", "b"])
    assert SamplingParams(structured_outputs=params).structured_outputs is params
    assert SamplingParams(structured_outputs={"choice": ["a", "b"]}).structured_outputs == params


TEXTS = st.lists(st.sampled_from([*range(EOS + 1 + len(EXTRA)), *b'{"a":12}', *b"</think>" * 3, *range(EOS, VOCAB)]), max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), TEXTS), max_size=8), st.booleans(), st.sampled_from([None, 0, 3]), st.booleans())
def test_state_is_a_function_of_the_history(changes: list[tuple[int, list[int]]], guided: bool, budget: int | None,
                                            grammar: bool) -> None:
    """Whatever was drafted and taken back, each row's mask is that of a state that saw this history alone."""
    constraint = _constraint(grammar, budget)
    table, history = Constraints(), [7, 7, 7]
    table.seat(0, constraint, 3, {EOS})
    rng = random.Random(len(changes))
    for back, more in changes:
        start = max(3, len(history) - back)
        history = history[:start] + (_guided(constraint, history[3:start], rng, 6) if guided else more)
        places = torch.arange(start, len(history) + 1)
        tokens = torch.tensor([history + [0] * 8])
        found = table.masks(torch.zeros_like(places), places, tokens, VOCAB)
        rows = {} if found is None else dict(zip(found[0].tolist(), unpack(found[1], VOCAB), strict=True))
        for row, place in enumerate(places.tolist()):
            fresh, mask = Follower(constraint, 3, {EOS}), torch.full((words(VOCAB),), -1, dtype=torch.int32)
            fresh.move(0, history[3:place])
            if fresh.mask(mask):
                assert torch.equal(rows[row], unpack(mask[None], VOCAB)[0])
                assert bool(rows[row].any())
            else:
                assert row not in rows


_COMPILER: list[ConstraintCompiler] = []


def _constraint(grammar: bool, budget: int | None) -> Constraint:
    if not _COMPILER:
        _COMPILER.append(ConstraintCompiler(byte_tokenizer(), VOCAB, [EOS]))
    wanted = {"grammar": 'root ::= "{\\"a\\":" [0-9]+ "}"'} if grammar or budget is None else None
    return compiled(_COMPILER[0], structured_outputs=wanted, reasoning_end_str=MARKER, thinking_token_budget=budget)


def _guided(constraint: Constraint, before: list[int], rng: random.Random, count: int) -> list[int]:
    """A continuation that obeys the constraint for a while, so that all stages are met."""
    follower, out = Follower(constraint, 0, {EOS}), list[int]()
    follower.move(0, before)
    for _ in range(count):
        mask = torch.full((words(VOCAB),), -1, dtype=torch.int32)
        follower.mask(mask)
        allowed = unpack(mask[None], VOCAB)[0].nonzero().flatten().tolist()
        likely = [t for t in (257, 258, *b'{"a":12}') if t in allowed]
        token = rng.choice(likely if likely and rng.random() < 0.8 else allowed)
        follower.move(len(before) + len(out), [token])
        out.append(token)
    return out


def test_reasoning_may_not_end_the_output(compiler: ConstraintCompiler) -> None:
    """With a grammar to follow EOS is forbidden; without one it is not."""
    for wanted, allowed in ((None, True), ({"regex": "a"}, False)):
        constraint = compiled(compiler, structured_outputs=wanted, reasoning_end_str=MARKER, thinking_token_budget=9)
        follower = Follower(constraint, 0, {EOS})
        mask = torch.full((words(VOCAB),), -1, dtype=torch.int32)
        follower.mask(mask)
        assert bool(unpack(mask[None], VOCAB)[0, EOS]) is allowed


@pytest.fixture(scope="module")
def random_model() -> LoadedModel:
    path = str(tiny_qwen3(4, vocab_size=VOCAB, max_position_embeddings=128))
    return with_tokenizer(load_model(LoadConfig(model=path, skip_tokenizer_init=True, device="cpu")))


def test_sampled_output_keeps_the_masked_distribution(random_model: LoadedModel) -> None:
    """Without a seed drafts go through rejection sampling: three letters of [a-d], against those of plain decoding."""
    def draw(k: int, n: int, seed: int) -> torch.Tensor:
        llm = LLM(random_model, kv_cache_tokens=40000, max_model_len=64, max_num_seqs=512, seed=seed,
                  speculative_config=speculate(k, 0.3))
        params = SamplingParams(n=n, temperature=1.5, max_tokens=5, structured_outputs={"regex": "[a-d]{3}"})
        texts = [c.text for c in serve(llm, [list(b"some prompt of letters")], params)[0].outputs]
        assert all(re.fullmatch("[a-d]{3}", t) for t in texts)
        assert not k or 0 < llm.stats()["num_accepted_tokens"] < llm.stats()["num_draft_tokens"]
        return torch.tensor([sum((ord(c) - 97) * 4**i for i, c in enumerate(t)) for t in texts])

    exact = torch.bincount(torch.cat([draw(0, 2000, s) for s in (1, 2)]), minlength=64).double() + 0.5
    assert chi_square(draw(3, 800, 3), exact / exact.sum()) >= SOUND


SCHEMA = {"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "mood": {"enum": ["good", "bad"]}}, "required": ["name", "age", "mood"]}


def test_smollm2_writes_json(smol: LoadedModel) -> None:
    """With and without drafts: the same texts, each a document of its schema, in one batch with a free request."""
    prompt = "Describe a person as JSON with name, age and mood:\n"
    wanted: list[dict[str, Any] | None] = [
        {"json": SCHEMA}, {"json": SCHEMA, "disable_any_whitespace": True}, {"regex": "[A-Z][a-z]{2,9}, [0-9]{1,2}"},
        {"choice": ["in good mood", "in bad mood"]}, None]
    params = [SamplingParams(temperature=0, max_tokens=40, structured_outputs=w) for w in wanted]
    params.append(SamplingParams(temperature=1, seed=1, max_tokens=48, structured_outputs={"json": json.dumps(SCHEMA)}))
    plain, drafted = (completions(serve(LLM(smol, kv_cache_tokens=2048, max_model_len=256, speculative_config=speculate(k, 0.3)),
                                        [list(smol.tokenizer(prompt)["input_ids"])] * len(params), params)) for k in (0, 4))
    assert [c.token_ids for c in plain] == [c.token_ids for c in drafted]
    for c in (drafted[0], drafted[1], drafted[5]):
        person = json.loads(c.text)
        assert list(person) == ["name", "age", "mood"]
        assert isinstance(person["name"], str)
        assert len(person["name"]) <= 12
        assert 0 <= person["age"] <= 120
        assert person["mood"] in ("good", "bad")
    assert "\n" not in drafted[1].text
    assert re.fullmatch("[A-Z][a-z]{2,9}, [0-9]{1,2}", drafted[2].text)
    assert drafted[3].text in ("in good mood", "in bad mood")
    assert [c.finish_reason for c in drafted[:4]] == ["stop"] * 4


def test_a_trial_holds_nothing_of_the_servers() -> None:
    """A child that outlives a killed server must not keep its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def held() -> None:
            os.fstat(server.fileno())

        verdict = try_grammar(held, 8, [0], Bounds())
        assert verdict is not None
        assert "Bad file descriptor" in verdict
        held()
