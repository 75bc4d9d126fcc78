"""Reasoning parsers: the same two fields for every split of the text. Case T38."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsespec.core.errors import InvalidValueError
from sparsespec.loader.loaded import LoadedModel
from sparsespec.server.reasoning import ReasoningParser, Style, ends_in_thinking, make_reasoning_parser

NAMES = ["qwen3", "deepseek_r1", "generic"]
PIECES = st.sampled_from(["<think>", "</think>", "<", ">", "/", "</", "</thi", "think", "ab", " ", "\n", "é", "😀", "<think",
                          "x</think"])
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def one_shot(name: str, text: str, in_thinking: bool = False) -> tuple[str, str]:
    return make_reasoning_parser(name, prompt_ends_in_thinking=in_thinking).feed(text, finished=True)


def in_pieces(parser: ReasoningParser, pieces: list[str]) -> tuple[str, str]:
    deltas = [parser.feed(p, finished=i == len(pieces) - 1) for i, p in enumerate(pieces)]
    return "".join(r for r, _ in deltas), "".join(c for _, c in deltas)


def chunks(text: str, size: int) -> list[str]:
    return [text[i:i + size] for i in range(0, len(text), size)] or [""]


# text, whether the prompt opened the reasoning, (reasoning, content) by qwen3, and by deepseek_r1
T38 = [
    ("<think>ab</think>cd", False, ("ab", "cd"), ("ab", "cd")),
    ("<think>ab</think>cd", True, ("ab", "cd"), ("ab", "cd")),
    ("ab</think>cd", False, ("", "ab</think>cd"), ("ab", "cd")),
    ("ab</think>cd", True, ("ab", "cd"), ("ab", "cd")),
    ("<think>ab", False, ("ab", ""), ("ab", "")),
    ("ab", True, ("ab", ""), ("ab", "")),
    ("ab", False, ("", "ab"), ("ab", "")),
    ("\n<think>\nab\n</think>\n\ncd", False, ("\n\nab\n", "\n\ncd"), ("\n\nab\n", "\n\ncd")),
    ("<think>a <think> b</think>c </think> <think>d</think>", False, ("a <think> b", "c </think> <think>d</think>"),
     ("a <think> b", "c </think> <think>d</think>")),
    ("use <think>x</think> tags", False, ("", "use <think>x</think> tags"), ("use <think>x", " tags")),
    ("<thinking>ab</thinking>", False, ("", "<thinking>ab</thinking>"), ("<thinking>ab</thinking>", "")),
    ("<think>a</thin k></think</think>b", False, ("a</thin k></think", "b"), ("a</thin k></think", "b")),
    ("<think></think>", False, ("", ""), ("", "")),
    ("<think></think>cd", False, ("", "cd"), ("", "cd")),
    ("<think>ab</thi", False, ("ab</thi", ""), ("ab</thi", "")),
    ("<thi", False, ("", "<thi"), ("<thi", "")),
    ("", False, ("", ""), ("", "")),
]


@pytest.mark.parametrize(("text", "in_thinking", "qwen3", "deepseek_r1"), T38)
def test_t38_every_split_gives_the_same_fields(text: str, in_thinking: bool, qwen3: tuple[str, str],
                                               deepseek_r1: tuple[str, str]) -> None:
    """Chunks of 1 to 8 characters, and 50 random splits."""
    rng = random.Random(0)
    for name, wanted in (("qwen3", qwen3), ("generic", qwen3), ("deepseek_r1", deepseek_r1)):
        assert one_shot(name, text, in_thinking) == wanted
        splits = [chunks(text, size) for size in range(1, 9)]
        for _ in range(50):
            cuts = sorted(rng.sample(range(len(text) + 1), min(3, len(text))))
            splits.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
        for pieces in splits:
            assert in_pieces(make_reasoning_parser(name, prompt_ends_in_thinking=in_thinking), pieces) == wanted


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, max_size=6), st.sampled_from(NAMES), st.booleans())
def test_random_texts_and_splits(pieces: list[str], name: str, in_thinking: bool) -> None:
    text = "".join(pieces)
    reasoning, content = one_shot(name, text, in_thinking)
    assert in_pieces(make_reasoning_parser(name, prompt_ends_in_thinking=in_thinking), pieces or [""]) == (reasoning, content)
    assert len(reasoning) + len(content) in {len(text) - n for n in (0, 7, 8, 15)}  # nothing but the tags is left out


def test_a_delta_is_given_out_as_soon_as_it_is_certain() -> None:
    parser = make_reasoning_parser("qwen3")
    steps = [("<thi", ("", "")), ("nk>a", ("a", "")), ("b<", ("b", "")), ("x", ("<x", "")), ("</think", ("", "")),
             (">c<", ("", "c<"))]
    for text, wanted in steps:
        assert parser.feed(text) == wanted
    assert parser.feed("", finished=True) == ("", "")


def test_tags_of_ones_own() -> None:
    style = Style("[THINK]", "[/THINK]")
    parser = make_reasoning_parser("generic", style=style)
    assert (parser.start_str, parser.end_str) == ("[THINK]", "[/THINK]")
    assert parser.feed("[THINK]<think>[/THINK]b", finished=True) == ("<think>", "b")
    with pytest.raises(InvalidValueError, match="generic"):
        make_reasoning_parser("qwen3", style=style)


def test_unknown_names_are_listed() -> None:
    with pytest.raises(InvalidValueError, match="deepseek_r1, generic, qwen3"):
        make_reasoning_parser("qwen4")


def test_prompts_that_open_reasoning() -> None:
    assert ends_in_thinking("<|im_start|>assistant\n<think>\n", "qwen3")
    assert not ends_in_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n", "qwen3")


@pytest.mark.parametrize("single", [False, True], ids=["tags of several tokens", "tags of one token"])
def test_reasoning_tokens(single: bool, smol: LoadedModel) -> None:
    """Counted by their text, without the tags; as OpenAI's usage has it."""
    tokenizer = smol.tokenizer
    if single:
        from copy import deepcopy
        tokenizer = deepcopy(tokenizer)
        tokenizer.add_tokens(["<think>", "</think>"])
    think, close = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("<think>", "</think>"))
    body, answer = tokenizer(" some long thought")["input_ids"], tokenizer(" and the answer")["input_ids"]
    count = make_reasoning_parser("qwen3", tokenizer).reasoning_tokens
    assert count([*think, *body, *close, *answer]) == len(body)
    assert count([*think, *body]) == len(body)
    assert count([*think, *close, *answer]) == 0
    assert count(answer) == count([]) == 0
    count = make_reasoning_parser("qwen3", tokenizer, prompt_ends_in_thinking=True).reasoning_tokens
    assert count([*body, *close, *answer]) == len(body)
    assert count(body) == len(body)
    with pytest.raises(InvalidValueError):
        make_reasoning_parser("qwen3").reasoning_tokens(body)
