"""Text from token blocks: joined deltas equal the full decode, and stop strings cut at the same place for any blocks."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from sparsespec.engine.detokenizer import IncrementalDetokenizer, make_decode
from sparsespec.engine.stop import StopChecker
from sparsespec.loader import default_model_path
from sparsespec.loader.gguf import GGUFFile
from sparsespec.loader.tokenizer import gguf_tokenizer

TEXTS = {
    "emoji with joiners": "a 👩‍👩‍👧‍👦 b 👍🏽 🏳️‍🌈🇰🇷!",
    "korean": "안녕하세요, 세계! 한국어 문장입니다.",
    "cjk and ascii": "GPU上的稀疏注意力sparse注意力is好的。日本語テスト",
    "combining marks": "e\u0301a\u0308 नमस्ते ท่าน Z\u0351\u036b\u0343a\u0328",
    "spaces and code": "def f(x):\n    return  x +  1\n\n\t# end   ",
    "replacement character itself": "before \ufffd\ufffd after \ufffd",
}


@lru_cache
def smollm2() -> Any:
    return gguf_tokenizer(GGUFFile(default_model_path()))


class Fast:
    """The two members of a transformers tokenizer that the detokeniser uses."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend

    def decode(self, ids: list[int], **_: Any) -> str:
        return str(self.backend_tokenizer.decode(ids))


def sentencepiece_like() -> Fast:
    """Pieces with a leading-space mark, single bytes as fallback, and the decoder that Llama 2 uses."""
    pieces = ["<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁Hello", "▁world", "▁", "你", "好", "a", "▁is", "▁Paris"]
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Fast(backend)


class NoBackend:
    """A tokenizer without a fast backend; remembers how it was called."""

    def __init__(self) -> None:
        self.kwargs: dict[str, Any] = {}

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        self.kwargs = kwargs
        return bytes(ids).decode("utf-8", "replace")


def blocks(ids: list[int], size: int) -> list[list[int]]:
    return [ids[i:i + size] for i in range(0, len(ids), size)]


def run(tokenizer: Any, ids: list[int], size: int, prompt: list[int] = [], **kwargs: bool) -> list[str]:  # noqa: B006
    detok = IncrementalDetokenizer(tokenizer, prompt, **kwargs)
    deltas = [detok.append(block) for block in blocks(ids, size)] + [detok.flush()]
    assert detok.text == "".join(deltas)
    assert detok.num_tokens == len(ids)
    return deltas


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", range(1, 9))
def test_deltas_equal_full_decode(name: str, size: int) -> None:
    tok = smollm2()
    ids = tok.encode(TEXTS[name], add_special_tokens=False)
    deltas = run(tok, ids, size)
    assert "".join(deltas) == tok.decode(ids, skip_special_tokens=True) == TEXTS[name]
    if "\ufffd" not in TEXTS[name]:
        assert not any("\ufffd" in d for d in deltas)


@pytest.mark.parametrize("size", range(1, 9))
def test_random_ids_equal_full_decode(size: int) -> None:
    """Random ids hold broken bytes all over, and special tokens."""
    tok, rng = smollm2(), random.Random(size)
    broken = [i for i in range(300) if "\ufffd" in tok.decode([i])]
    assert len(broken) > 100
    for trial in range(15):
        pool = broken if trial % 3 == 0 else range(len(tok)) if trial % 3 == 1 else [*broken, 0, 1, 2, 19556, 216]
        ids = rng.choices(list(pool), k=rng.randint(1, 400))
        for skip in (True, False):
            expected = tok.decode(ids, skip_special_tokens=skip)
            assert "".join(run(tok, ids, size, prompt=[19556], skip_special_tokens=skip)) == expected


@pytest.mark.parametrize("token_text", ["\ufffd", "a"])
def test_window_stays_bounded(token_text: str) -> None:
    """A model stuck on one token, even half a character, costs the same at every step."""
    tok = smollm2()
    token = next(i for i in range(200) if tok.decode([i]) == token_text)
    detok = IncrementalDetokenizer(tok, [])
    widest, given = 0, 0
    for _ in range(2000):
        given += len(detok.append([token]))
        widest = max(widest, len(detok._window))
    assert widest < 256
    assert given > 1900
    detok.flush()
    assert detok.text == tok.decode([token] * 2000)


def test_special_tokens_follow_the_flag() -> None:
    tok = smollm2()
    ids = tok.encode("a<|im_end|>b", add_special_tokens=False)
    assert "".join(run(tok, ids, 2)) == "ab"
    assert "".join(run(tok, ids, 2, skip_special_tokens=False)) == "a<|im_end|>b"


@pytest.mark.parametrize("size", range(1, 6))
def test_sentencepiece_keeps_the_space_after_the_prompt(size: int) -> None:
    tok = sentencepiece_like()
    backend = tok.backend_tokenizer
    ids = [backend.token_to_id(p) for p in ("▁Paris", "▁world", "你", "▁is", "a", "▁", "好")]
    ids += [1 + b for b in "é안".encode()]
    ids = ids * 12
    prompt = [0, backend.token_to_id("▁Hello"), backend.token_to_id("▁is")]
    text = "".join(run(tok, ids, size, prompt=prompt))
    assert text == backend.decode(prompt + ids)[len(backend.decode(prompt)):]
    assert text.startswith(" Paris world你")
    assert "".join(run(tok, ids, size)) == backend.decode(ids)
    rare = [1 + b for b in ("안" * 150 + "é").encode()]  # every character a run of fallback bytes
    assert "".join(run(tok, rare, size, prompt=prompt)) == "안" * 150 + "é"


def test_tokenizer_without_a_fast_backend() -> None:
    tok = NoBackend()
    assert "".join(run(tok, list("né 한".encode()), 1)) == "né 한"
    make_decode(tok, False, False)([65])
    assert tok.kwargs == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False,
                          "spaces_between_special_tokens": False}


def test_prompt_ending_in_half_a_character_leaves_the_output_alone() -> None:
    tok = smollm2()
    half = tok.encode("👍", add_special_tokens=False)[:1]
    ids = tok.encode("ok 👍", add_special_tokens=False)
    assert "".join(run(tok, ids, 1, prompt=half)) == "ok 👍"


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_offsets_and_token_count(size: int) -> None:
    tok = smollm2()
    ids = tok.encode("".join(TEXTS.values()), add_special_tokens=False)
    one = IncrementalDetokenizer(tok, [])
    expected = []
    for token in ids:
        one.append([token])
        expected.append(len(one.text))
    expected[-1] += len(one.flush())
    detok = IncrementalDetokenizer(tok, [])
    for block in blocks(ids, size):
        before, delta = len(detok.text), detok.append(block)
        for end in range(before + 1, before + len(delta) + 1):
            assert detok.token_count(end) == 1 + next(i for i, e in enumerate(expected) if e >= end)
    detok.flush()
    assert detok.offsets == expected
    assert detok.token_count(0) == 0
    for end in range(1, len(detok.text) + 1, 7):
        assert detok.token_count(end) == 1 + next(i for i, e in enumerate(expected) if e >= end)


# --- stop strings ---------------------------------------------------------------------------------------------------

class Chars:
    """A text whose tokens are pieces of given lengths."""

    def __init__(self) -> None:
        self.text, self.ends = "", []  # type: ignore[var-annotated]

    def add(self, pieces: list[str]) -> int:
        for piece in pieces:
            self.text += piece
            self.ends.append(len(self.text))
        return sum(map(len, pieces))

    @property
    def num_chars(self) -> int:
        return len(self.text)

    def since(self, start: int) -> str:
        return self.text[start:]

    def token_count(self, end: int) -> int:
        return 1 + next(i for i, e in enumerate(self.ends) if e >= end)


def feed(pieces: list[str], size: int, stops: list[str], include: bool = False,
         min_tokens: int = 0) -> tuple[str, int, str | None, list[str]]:
    """Run as an engine would: returns final text, tokens kept, the stop string, and what was streamed."""
    checker, out, streamed, sent = StopChecker(stops, include, min_tokens), Chars(), [], 0
    for i in range(0, len(pieces), size):
        match = checker.check(out, out.add(pieces[i:i + size]))
        end = match.cut if match else len(out.text) - checker.holdback(out.text)
        assert end >= sent
        streamed.append(out.text[sent:end])
        sent = end
        if match:
            return out.text[:match.cut], match.num_tokens, match.stop, streamed
    streamed.append(out.text[sent:])
    return out.text, len(pieces), None, streamed


def reference(pieces: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[str, int, str | None]:
    """Character by character: the first that completes, of those the one that begins first."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        for char in piece:
            text += char
            hits = [s for s in stops if text.endswith(s)]
            if hits and count >= min_tokens:
                stop = max(hits, key=len)
                return (text if include else text[:-len(stop)]), count, stop
    return text, len(pieces), None


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
def test_stop_in_block_and_across_blocks(size: int, include: bool) -> None:
    pieces = ["one ", "tw", "o ST", "OP th", "ree", " STOP", " four"] + ["x"] * 12
    text, kept, stop, streamed = feed(pieces, size, ["STOP"], include)
    assert text == ("one two STOP" if include else "one two ")
    assert (kept, stop) == (4, "STOP")
    assert "".join(streamed) == text


def test_stop_first_in_a_block_of_sixteen() -> None:
    text, kept, stop, streamed = feed(["###"] + ["y"] * 15, 16, ["###"])
    assert (text, kept, stop, "".join(streamed)) == ("", 1, "###", "")


def test_overlapping_stops() -> None:
    assert feed(["xxENDOFyy"], 1, ["END", "DOF"])[:3] == ("xx", 1, "END")
    assert feed(["xxENDOFyy"], 1, ["DOF", "END"])[:3] == ("xx", 1, "END")
    assert feed(["abcd"], 1, ["bcd", "cd", "d"])[:3] == ("a", 1, "bcd")
    assert feed(["ab", "cd"], 2, ["abcd", "bc"])[:3] == feed(["ab", "cd"], 1, ["abcd", "bc"])[:3] == ("a", 2, "bc")


def test_holdback() -> None:
    checker = StopChecker(["\n\nUser:", "END"])
    assert checker.holdback("hello") == 0
    assert checker.holdback("hello\n") == 1
    assert checker.holdback("hello\n\nUse") == 5
    assert checker.holdback("\n\nE") == 1
    assert checker.holdback("") == 0
    assert StopChecker([]).holdback("abc") == 0


def test_min_tokens_lets_early_matches_pass() -> None:
    assert feed(["a", "S", "b", "S", "c"], 5, ["S"], min_tokens=3)[:3] == ("aSb", 4, "S")
    assert feed(["a", "S", "b", "S", "c"], 1, ["S"], min_tokens=2)[:3] == ("a", 2, "S")


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.text("ab|", max_size=4), min_size=1, max_size=20),
       stops=st.lists(st.text("ab|", min_size=1, max_size=4), min_size=1, max_size=3),
       size=st.integers(1, 9), include=st.booleans(), min_tokens=st.integers(0, 4))
def test_any_split_gives_the_same_result(pieces: list[str], stops: list[str], size: int, include: bool,
                                         min_tokens: int) -> None:
    text, kept, stop, streamed = feed(pieces, size, stops, include, min_tokens)
    assert (text, kept, stop) == reference(pieces, stops, include, min_tokens)
    assert "".join(streamed) == text


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_stop_over_real_tokens(size: int) -> None:
    """No kept token starts after the match, and every token up to it is kept."""
    tok = smollm2()
    ids = tok.encode("Bonjour 世界 ende und mehr Wörter danach, und noch mehr", add_special_tokens=False)
    for stop in ("世", "界 ende", "und", "rter", ", un"):
        detok, checker, match = IncrementalDetokenizer(tok, []), StopChecker([stop]), None
        for block in blocks(ids, size):
            match = checker.check(detok, len(detok.append(block)))
            if match:
                break
        assert match is not None
        full = tok.decode(ids)
        assert detok.text[:match.cut] == full[:full.index(stop)]
        assert stop in tok.decode(ids[:match.num_tokens])
        assert stop not in tok.decode(ids[:match.num_tokens - 1])
