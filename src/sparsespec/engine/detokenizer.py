"""Incremental detokenisation of one request: token blocks in, text that can no longer change out.

The joined deltas equal one decode of all output ids, however the ids are split into blocks. Only a window of recent
tokens is decoded at each call. `tokenizers.DecodeStream` does half of this, but it cannot give out at the end what it
holds back, and knows no positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate
from typing import Any

_REPLACEMENT = "\ufffd"
_PROMPT_TAIL = 8  # prompt tokens that the first output token is decoded after
_WINDOW = 48  # tokens decoded at most, where a safe place to cut the window is found
_KEEP = 8  # tokens that stay in a window that was cut
_RETRY = 8  # tokens until the next try where no safe place was found
_MAX_RUN = 128  # a longer run of replacement characters is broken text, no character in the making

Decode = Callable[[Sequence[int]], str]


def make_decode(tokenizer: Any, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> Decode:
    """The one decode that all text comes from. No clean-up of spaces: it would rewrite text that was given out already."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # a fast tokenizer: the same text, without the wrapper's cost
        return lambda ids: str(backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
    return lambda ids: str(tokenizer.decode(
        list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False,
        spaces_between_special_tokens=spaces_between_special_tokens))


class IncrementalDetokenizer:
    """Text of one request.

    The text continues the prompt: a tokenizer that drops a leading space (sentencepiece) keeps it here, as prompt + text
    has to read on. For byte-level tokenizers text is exactly tokenizer.decode(output ids).

    A character whose bytes are not complete is held back, so text never ends in half a character before `flush`.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True,
                 spaces_between_special_tokens: bool = True) -> None:
        self._decode = make_decode(tokenizer, skip_special_tokens, spaces_between_special_tokens)
        self._prompt_tail = self._context(prompt_token_ids)
        self._restart()

    def _restart(self) -> None:
        self._ids: list[int] = []
        self._parts: list[str] = []
        self._length = 0  # characters given out
        self._window = list(self._prompt_tail)
        self._decoded = self._decode(self._window) if self._window else ""
        self._sent = len(self._decoded)  # characters of the window's text that were given out, or are the prompt's
        self._cut_at = _WINDOW
        # the state before the last block, so that a position in its text can be mapped to one of its tokens
        self._block_start, self._block_length, self._block_sent = 0, 0, self._sent

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def num_chars(self) -> int:
        """Characters given out so far."""
        return self._length

    def since(self, start: int) -> str:
        """`text` from character `start` on; costs what it gives, however long the text before it is."""
        first, at = len(self._parts), self._length
        while first and at > start:
            first -= 1
            at -= len(self._parts[first])
        return "".join(self._parts[first:])[max(0, start - at):]

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens, return the text that became final with them (it may be empty)."""
        self._cut_window()
        self._block_start, self._block_length, self._block_sent = len(self._ids), self._length, self._sent
        self._ids.extend(token_ids)
        self._window.extend(token_ids)
        self._decoded = self._decode(self._window)
        return self._give(self._stable(self._decoded))

    def flush(self) -> str:
        """Return what was held back; the request is over. Bytes that never became a character read as U+FFFD."""
        return self._give(len(self._decoded))

    def token_count(self, end: int) -> int:
        """Tokens up to and including the one that completes the first `end` characters of the text.

        Costs a decode a token of the last block; positions before it are found by going through all output once.
        """
        if end <= 0 or not self._ids:
            return 0
        if end > self._block_length:
            base, before = len(self._window) - (len(self._ids) - self._block_start), self._block_length - self._block_sent
            sent = self._block_sent
            for i in range(base + 1, len(self._window) + 1):
                sent = max(sent, self._stable(self._decode(self._window[:i])))
                if before + sent >= end:
                    return self._block_start + i - base
            return len(self._ids)
        return min(bisect_left(self.offsets, end) + 1, len(self._ids))

    @property
    def offsets(self) -> list[int]:
        """For each output token, the length of the text that is final with it. One pass over all output."""
        replay = copy(self)
        replay._restart()
        ends = list(accumulate(len(replay.append([token])) for token in self._ids))
        if ends and ends[-1] < self._length:
            ends[-1] = self._length  # flushed: the last token closes the text
        return ends

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        tail = list(prompt_token_ids[-_PROMPT_TAIL:])
        text = self._decode(tail) if tail else ""
        # Half a character at the prompt's end would swallow the output's first bytes; no text gives no context.
        return tail if text and not text.endswith(_REPLACEMENT) and not text.startswith(_REPLACEMENT) else []

    @staticmethod
    def _stable(decoded: str) -> int:
        """Length of `decoded` without the replacement characters at its end, which later bytes may still change."""
        stable = len(decoded.rstrip(_REPLACEMENT))
        if len(decoded) - stable > _MAX_RUN:
            return len(decoded) - 1  # at most the last of them can still become a character
        return stable

    def _give(self, stable: int) -> str:
        if stable <= self._sent:
            return ""
        delta = self._decoded[self._sent:stable]
        self._sent = stable
        self._length += len(delta)
        self._parts.append(delta)
        return delta

    def _cut_window(self) -> None:
        """Shorten the window where the text before and after the cut are independent of each other."""
        if len(self._window) < self._cut_at:
            return
        for keep in range(_KEEP, 2 * _KEEP):
            tail, head = self._window[-keep:], self._window[:-keep]
            text, before = self._decode(tail), self._decode(head)
            dropped = len(self._decoded) - len(text)
            if text and self._sent > dropped and self._decoded in (before + text, before + " " + text):
                self._window, self._decoded, self._sent = tail, text, self._sent - dropped
                self._cut_at = _WINDOW
                return
        self._cut_at = len(self._window) + _RETRY
