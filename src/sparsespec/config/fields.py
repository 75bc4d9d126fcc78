"""Helpers for configuration dataclasses: documented fields, strict construction, and the values' checks."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from sparsespec.core.errors import InvalidValueError, UnknownFieldError

T = TypeVar("T")


def option(default: Any, help: str, *, choices: tuple[str, ...] | None = None, cli: bool = True, several: bool = False) -> Any:
    """A dataclass field with its one-line documentation; the CLI flag and its help come from it.

    choices: the values it may have besides None where that is the default. several: one flag takes a list of values.
    """
    metadata = {"help": help, "choices": choices, "cli": cli, "several": several}
    return dataclasses.field(default=default, metadata=metadata)


def from_dict(cls: type[T], values: dict[str, Any], where: str) -> T:
    """Build `cls` from a mapping. An unknown key raises UnknownFieldError naming the known ones."""
    known = {f.name for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    kwargs: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise UnknownFieldError(f"{where}.{key}", value, "unknown key", f"Known keys: {', '.join(sorted(known))}")
        kwargs[key] = value
    return cls(**kwargs)


def check_choices(config: Any, where: str = "") -> None:
    """Raise for every field whose value is not among its declared choices."""
    for f in dataclasses.fields(config):
        choices = f.metadata.get("choices")
        value = getattr(config, f.name)
        if choices and value not in choices and not (value is None and f.default is None):
            raise InvalidValueError(where + f.name, value, "not one of the choices", f"Choose from: {', '.join(choices)}")


def check_range(name: str, value: Any, low: float, high: float | None = None, *, integer: bool = True,
                remedy: str = "") -> None:
    """Raise unless `value` is a number (an integer by default) in [low, high]."""
    kind = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise InvalidValueError(name, value, "not an integer" if integer else "not a number", remedy or f"Give {name} as a number")
    if not value >= low or (high is not None and not value <= high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidValueError(name, value, "out of range", remedy or f"Give a value {bound}")
