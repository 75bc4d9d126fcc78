"""Stop strings of one request: where the text ends, which tokens stay, and what may be streamed meanwhile.

The match that ends first wins, and of two that end together the one that begins first. That is what decoding one
character at a time would have found, so the result is the same whatever blocks the text arrives in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class TokenizedText(Protocol):
    """What the checker reads of an IncrementalDetokenizer."""

    @property
    def num_chars(self) -> int: ...

    def since(self, start: int) -> str: ...

    def token_count(self, end: int) -> int: ...


@dataclass(frozen=True)
class StopMatch:
    """stop: the string that matched. cut: characters of the text to keep. num_tokens: output tokens to keep, up to and
    including the one that completes the match; none of them starts after it."""

    stop: str
    cut: int
    num_tokens: int


class StopChecker:
    """Looks for stop strings in a growing text.

    min_tokens: a match completed by an earlier token than this one (counted from 1) does not stop.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop_str_in_output: bool = False, min_tokens: int = 0) -> None:
        self.stop_strings = list(stop_strings)
        self.include_stop_str_in_output = include_stop_str_in_output
        self.min_tokens = min_tokens
        self._longest = max((len(s) for s in self.stop_strings), default=0)

    def check(self, output: TokenizedText, new_chars: int) -> StopMatch | None:
        """Search after `new_chars` characters were added to the text. Call it after every addition, flush included."""
        if not self.stop_strings or new_chars <= 0:
            return None
        min_end = output.num_chars - new_chars + 1
        first = max(0, min_end - self._longest)
        text = output.since(first)
        while (found := self.find(text, min_end - first)) is not None:
            start, end, stop = found[0] + first, found[1] + first, found[2]
            tokens = output.token_count(end)
            if tokens >= self.min_tokens:
                return StopMatch(stop, end if self.include_stop_str_in_output else start, tokens)
            min_end = end + 1
        return None

    def find(self, text: str, min_end: int = 0) -> tuple[int, int, str] | None:
        """(start, end, stop string) of the match that ends first, at `min_end` or later; then the one that begins first."""
        best: tuple[int, int, str] | None = None
        for stop in self.stop_strings:
            start = text.find(stop, max(0, min_end - len(stop)))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, start) < (best[1], best[0]):
                best = (start, end, stop)
        return best

    def settled(self, output: TokenizedText) -> int:
        """Characters of a growing text that may be streamed."""
        return output.num_chars - self.holdback(output.since(max(0, output.num_chars - self._longest)))

    def holdback(self, text: str) -> int:
        """Characters at the end of `text` that could begin a stop string and must not be streamed yet."""
        longest = min(self._longest - 1, len(text))
        for length in range(longest, 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self.stop_strings):
                return length
        return 0
