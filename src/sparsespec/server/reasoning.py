"""Splits a model's text into its reasoning and its answer, while it streams.

    parser = make_reasoning_parser("qwen3", tokenizer)
    reasoning, content = parser.feed("<think>ab</think>cd", finished=True)   # ("ab", "cd")

The joined deltas are the same however the text is cut: what may yet become a tag is held back until that is clear.
A tag counts once, where it belongs: the opening one at the beginning (after white space alone), the closing one at its
first place after that. Anywhere else it is text like any other. Only the tags themselves are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsespec.core.errors import InvalidValueError


def held_back(text: str, tag: str) -> int:
    """How many characters at the end of a text may begin a tag that is not complete."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)


_LEADING = 4  # tokens of white space that may stand before the opening tag


@dataclass(frozen=True)
class Style:
    """How a model marks its reasoning. always: it reasons from the first character on, opening tag or not."""

    start: str = "<think>"
    end: str = "</think>"
    always: bool = False


STYLES = {"qwen3": Style(), "deepseek_r1": Style(always=True), "generic": Style()}
"""By name. qwen3, generic: reasoning only after an opening tag, in the output or at the end of the prompt."""


class ReasoningParser:
    """One request's text. in_reasoning: the prompt has opened the reasoning already."""

    def __init__(self, style: Style, tokenizer: Any | None, in_reasoning: bool) -> None:
        self.style, self.tokenizer = style, tokenizer
        self.in_reasoning = in_reasoning or style.always
        self.opened = self.in_reasoning
        self.closed = False
        self._begun = False  # the place for an opening tag is behind
        self._pending = ""

    @property
    def start_str(self) -> str:
        """The tag that opens reasoning."""
        return self.style.start

    @property
    def end_str(self) -> str:
        """The tag that closes reasoning: what `SamplingParams.reasoning_end_str` is to be."""
        return self.style.end

    @property
    def held(self) -> int:
        """Characters, the last ones fed, of which it is not known yet what they are."""
        return len(self._pending)

    def feed(self, delta_text: str, finished: bool = False) -> tuple[str, str]:
        """(reasoning, content) that became certain with the next piece of text; with `finished` all that was held back."""
        text, self._pending = self._pending + delta_text, ""
        if not self._begun:
            text = self._begin(text, finished)
            if not self._begun:
                return "", ""
        if self.closed or not self.opened:
            return "", text
        at = text.find(self.style.end)
        if at >= 0:
            self.closed = True
            return text[:at], text[at + len(self.style.end):]
        keep = 0 if finished else held_back(text, self.style.end)
        self._pending = text[len(text) - keep:]
        return text[:len(text) - keep], ""

    def _begin(self, text: str, finished: bool) -> str:
        """Look for the opening tag; gives the text without it, or holds all of it back."""
        rest = text.lstrip()
        if rest.startswith(self.style.start):
            self._begun = self.opened = True
            return text[:len(text) - len(rest)] + rest[len(self.style.start):]
        if self.style.start.startswith(rest) and not finished:
            self._pending = text
            return ""
        self._begun = True
        return text

    def reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """How many output tokens hold reasoning; those of the tags are not counted. Does not depend on what was fed.

        Cheap where each tag is one token, as in reasoning models; else some decodes of the whole.
        Raises InvalidValueError without a tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidValueError("tokenizer", None, "reasoning tokens can't be counted without one", "Load one")
        ids = list(token_ids)
        tags = [self.tokenizer(tag, add_special_tokens=False)["input_ids"] for tag in (self.style.start, self.style.end)]
        if all(len(tag) == 1 for tag in tags):
            first = next((i for i, token in enumerate(ids[:_LEADING]) if token == tags[0][0]), None)
            tagged = first is not None and not self._decode(ids[:first]).strip()
            if not tagged and not self.in_reasoning:
                return 0
            begin = first + 1 if tagged and first is not None else 0
            return (ids.index(tags[1][0], begin) if tags[1][0] in ids[begin:] else len(ids)) - begin
        text = self._decode(ids)
        reasoning = ReasoningParser(self.style, None, self.in_reasoning).feed(text, finished=True)[0]
        if not reasoning:
            return 0
        tagged = text.lstrip().startswith(self.style.start)
        opening = text.find(self.style.start) + len(self.style.start) if tagged else 0
        end = text.find(self.style.end, opening)
        return self._tokens_up_to(ids, end if end >= 0 else len(text)) - self._tokens_up_to(ids, opening)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False,  # type: ignore[union-attr]
                                         clean_up_tokenization_spaces=False))

    def _tokens_up_to(self, ids: list[int], end: int) -> int:
        """The fewest tokens whose text has `end` characters or more."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self._decode(ids[:middle]).rstrip("\ufffd")) >= end:
                high = middle
            else:
                low = middle + 1
        return low


def make_reasoning_parser(name: str, tokenizer: Any | None = None, *, prompt_ends_in_thinking: bool = False,
                          style: Style | None = None) -> ReasoningParser:
    """A parser for one completion. Raises InvalidValueError for an unknown name.

    prompt_ends_in_thinking: the chat template has opened the reasoning, so the output begins inside it. style: tags of
    one's own, with the name "generic". tokenizer: for `reasoning_tokens` alone.
    """
    if name not in STYLES:
        raise InvalidValueError("reasoning_parser", name, "not a known reasoning parser", f"Known: {', '.join(sorted(STYLES))}")
    if style is not None and name != "generic":
        raise InvalidValueError("reasoning_parser", name, "has tags of its own", 'Give them with the name "generic"')
    return ReasoningParser(style or STYLES[name], tokenizer, prompt_ends_in_thinking)


def ends_in_thinking(prompt: str, name: str, style: Style | None = None) -> bool:
    """Whether a prompt's text ends with the opening tag, white space aside."""
    used = style or STYLES[name]
    return prompt.rstrip().endswith(used.start)
