"""What a completion costs a step does not grow with what it already has. Operations are counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest

from sparsespec.core.outputs import Logprob
from sparsespec.core.request import Request
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.engine.detokenizer import IncrementalDetokenizer
from sparsespec.engine.output import Completion

TOKENS, BLOCK = 3000, 3
STOP = "never to be seen"


class Bytes:
    """A tokenizer of bytes."""

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return bytes(ids).decode("latin-1")


class Counting(dict[int, Logprob]):
    """Counts how often any of its kind was read."""

    reads = 0

    def __getitem__(self, token: int) -> Logprob:
        Counting.reads += 1
        return super().__getitem__(token)


def completion(**params: Any) -> Completion:
    p = SamplingParams(max_tokens=2 * TOKENS, **params)
    return Completion(Request("a", [65], p, 0, False, 2 * TOKENS, frozenset({0}), frozenset({0})), 0, Bytes())


def grow(c: Completion, tokens: list[int], reason: str | None = None) -> None:
    """As the scheduler and the engine do it."""
    c.request.output_token_ids.extend(tokens)
    c.add(tokens, [Counting({t: Logprob(-t / 128)}) for t in tokens], reason, None)


def test_a_token_is_looked_at_once_however_long_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    joined, given = [], []
    text, since = IncrementalDetokenizer.text, IncrementalDetokenizer.since
    assert isinstance(text, property)
    whole = text.fget
    assert whole is not None
    monkeypatch.setattr(IncrementalDetokenizer, "text", property(lambda self: joined.append(1) or whole(self)))
    monkeypatch.setattr(IncrementalDetokenizer, "since", lambda self, start: given.append(s := since(self, start)) or s)
    monkeypatch.setattr(Counting, "reads", 0)
    c, streamed = completion(logprobs=1, stop=[STOP]), []
    ids = [97 + i % 26 for i in range(TOKENS)]
    for at in range(0, TOKENS, BLOCK):
        grow(c, ids[at:at + BLOCK], "length" if at + BLOCK >= TOKENS else None)
        delta = c.delta()
        streamed.append(delta.text if delta else "")
    steps = TOKENS // BLOCK
    assert Counting.reads == TOKENS
    assert len(joined) == 1, "the whole text is built at the end alone"
    assert sum(map(len, given)) <= steps * 3 * (len(STOP) + BLOCK)
    assert "".join(streamed) == c.output.text == bytes(ids).decode()
    assert c.output.cumulative_logprob == pytest.approx(sum(-t / 128 for t in ids))


def test_tokens_after_a_stop_string_take_their_logprobs_with_them() -> None:
    c = completion(logprobs=1, stop=["ef"])
    for block in ("abc", "defgh"):
        grow(c, list(block.encode()))
    out = c.output
    assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == ("abcd", list(b"abcdef"), "stop", "ef")
    assert out.logprobs is not None
    assert len(out.logprobs) == 6
    assert out.cumulative_logprob == sum(-t / 128 for t in b"abcdef")


def test_snapshots_hold_back_what_may_begin_a_stop_string() -> None:
    c = completion(logprobs=1, stop=["ef"])
    seen = []
    for block in ("ab", "cde", "g"):
        grow(c, list(block.encode()))
        seen.append((c.snapshot().text, round(128 * (c.snapshot().cumulative_logprob or 0))))
    assert seen == [("ab", -195), ("abcd", -495), ("abcdeg", -598)]
