"""What a request's output has to match: one of a JSON schema, any JSON object, a regex, a list of choices or a grammar.

    SamplingParams(structured_outputs={"json": {"type": "object", "properties": {"age": {"type": "integer"}}}})
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from sparsespec.core.errors import InvalidValueError, UnknownFieldError, UnsupportedError

MAX_SOURCE = 1 << 16
"""Most characters of a schema, regex, grammar or all choices together: bounds what compiling them can cost."""

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first five is given (vLLM's names).

    json: a JSON schema, as a dict or as text. json_object: True for any JSON object. regex: the whole output matches it.
    choice: the output is one of these strings. grammar: EBNF whose first rule is `root`. disable_any_whitespace: JSON is
    written in one line with one space after each comma and colon. whitespace_pattern is refused.

    Raises InvalidValueError, UnknownFieldError or UnsupportedError; what only the compiler can tell comes at admission.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    @classmethod
    def from_any(cls, value: StructuredOutputsParams | dict[str, Any]) -> StructuredOutputsParams:
        """The value itself, or one built from a mapping; an unknown key is an error that lists the known ones."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise InvalidValueError("structured_outputs", value, "neither a mapping nor a StructuredOutputsParams",
                                    'Give for example {"regex": "[0-9]+"}')
        known = [f.name for f in fields(cls)]
        for key in value:
            if key not in known:
                raise UnknownFieldError(f"structured_outputs.{key}", value[key], "not a kind of structured output",
                                        f"Known: {', '.join(known)}")
        return cls(**value)

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise InvalidValueError("structured_outputs", given, f"{len(given)} of its kinds are given, not one",
                                    f"Give exactly one of {', '.join(_KINDS)}")
        if self.json_object not in (None, False, True):
            raise InvalidValueError("structured_outputs.json_object", self.json_object, "not a boolean", "Give True")
        if self.whitespace_pattern is not None:
            raise UnsupportedError("structured_outputs.whitespace_pattern", self.whitespace_pattern,
                                   "whitespace can't follow a pattern", "Use disable_any_whitespace, or write a grammar")
        if not isinstance(self.disable_any_whitespace, bool):
            raise InvalidValueError("structured_outputs.disable_any_whitespace", self.disable_any_whitespace, "not a boolean",
                                    "Give True or False")
        for kind in ("regex", "grammar"):
            value = getattr(self, kind)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidValueError(f"structured_outputs.{kind}", value, "not text, or empty", "Give it as a string")
        if self.choice is not None:
            self._check_choice(self.choice)
        if len(self.source) > MAX_SOURCE:
            raise InvalidValueError(self.field, self.source, f"{len(self.source)} characters, more than {MAX_SOURCE}",
                                    "Give a smaller one")

    @staticmethod
    def _check_choice(choice: Any) -> None:
        if not isinstance(choice, list) or not choice or not all(isinstance(c, str) and c for c in choice):
            raise InvalidValueError("structured_outputs.choice", choice, "not a list of non-empty strings",
                                    'Give for example ["yes", "no"]')

    @property
    def kind(self) -> str:
        """Which of the five is given."""
        return next(kind for kind in _KINDS if getattr(self, kind) not in (None, False))

    @property
    def field(self) -> str:
        """Its name in messages."""
        return f"structured_outputs.{self.kind}"

    @property
    def source(self) -> str:
        """Its text. Raises InvalidValueError for a schema that is not JSON."""
        value = getattr(self, self.kind)
        if self.kind in ("regex", "grammar"):
            return str(value)
        if self.kind == "json" and isinstance(value, str):
            return value
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as e:
            raise InvalidValueError(self.field, value, f"not JSON ({e})", "Give a JSON schema") from e
