"""Which characters of an answer accepted drafts wrote, and which the target's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from sparsespec.core.outputs import CompletionOutput
from sparsespec.engine.detokenizer import IncrementalDetokenizer
from sparsespec.server.parsing import ChoiceParser, Piece

Spans = dict[str, list[tuple[int, bool]]]


class DraftOrigin:
    """One choice without tools. A character belongs to the token that completes it, whenever it is given out.

    The engine gives text in rounds; so tokens are decoded here once more, one by one, and only for who asks.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], parser: ChoiceParser, skip_special_tokens: bool,
                 spaces_between_special_tokens: bool) -> None:
        self._text = IncrementalDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)
        self._parser = parser
        self._ahead: list[bool] = []  # of characters that the engine holds back
        self._held: list[bool] = []  # of characters that the parser holds back
        self._last = False

    def feed(self, c: CompletionOutput, finished: bool) -> tuple[Piece, Spans]:
        """Parse an increment of the choice; the spans of its reasoning and content, where there are any."""
        for token, self._last in zip(c.token_ids, c.from_draft, strict=True):
            self._ahead += [self._last] * len(self._text.append([token]))
        missing = len(c.text) - len(self._ahead)  # half a character at the end
        origins = self._ahead[:len(c.text)] + [self._last] * missing
        del self._ahead[:len(c.text)]
        whole, found = Piece(), {"reasoning": list[bool](), "content": list[bool]()}
        # One character at a time: a tag, which the parser leaves out, then ends where the parser's input does.
        for char, origin in zip(c.text, origins, strict=True):
            self._held.append(origin)
            self._note(self._parser.feed(char, False), whole, found)
        if finished:
            self._note(self._parser.feed("", True), whole, found)
        return whole, {name: [(len(list(run)), origin) for origin, run in groupby(values)]
                       for name, values in found.items() if values}

    def _note(self, piece: Piece, whole: Piece, found: dict[str, list[bool]]) -> None:
        """Add a piece to the whole. Of what the parser let go of, its text comes first; a tag behind it is dropped."""
        whole.reasoning += piece.reasoning
        whole.content += piece.content
        split = len(piece.reasoning)
        found["reasoning"] += self._held[:split]
        found["content"] += self._held[split:split + len(piece.content)]
        del self._held[:len(self._held) - self._parser.held]
