"""What single tokens say, for log probabilities: text for people, bytes to be joined to exact text."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sparsespec.engine.detokenizer import make_decode

_REPLACEMENT = "\ufffd"


class TokenText:
    """Text and bytes of token ids; remembers them. Without a tokenizer a token's text is `token_id:N`."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._decode = make_decode(tokenizer, skip_special_tokens=False) if tokenizer is not None else None
        self._alphabet = _byte_alphabet()
        self.of = lru_cache(maxsize=200_000)(self._of)

    def _of(self, token_id: int) -> tuple[str, list[int] | None]:
        """(text, bytes). A token that is a part of a character has U+FFFD as its text and its own bytes."""
        if self._decode is None:
            return f"token_id:{token_id}", None
        text = self._decode([token_id])
        if _REPLACEMENT not in text:
            return text, list(text.encode("utf-8"))
        return text, self._raw(token_id)

    def _raw(self, token_id: int) -> list[int] | None:
        piece = self._tokenizer.convert_ids_to_tokens(token_id) if self._tokenizer is not None else None
        if not piece:
            return None
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # sentencepiece's single bytes
            return [int(piece[3:5], 16)]
        if all(c in self._alphabet for c in piece):
            return [self._alphabet[c] for c in piece]
        return None


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes with: printable ones stand for themselves, the others follow 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
