"""Sampling defaults that a model recommends in its generation_config.json, for requests that say nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsespec.core.errors import InvalidValueError
from sparsespec.core.sampling_params import SamplingParams

_FILE = "generation_config.json"
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(source: str, model: str) -> dict[str, Any]:
    """Fields of SamplingParams. source: auto, the model's own where it has one; none; or a directory that holds one.

    Raises InvalidValueError for a directory without one and for values that are not usable.
    """
    if source == "none":
        return {}
    path = _of_model(model) if source == "auto" else Path(source).expanduser() / _FILE
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        values = {name: found[name] for name in _FIELDS if found.get(name) is not None}
        SamplingParams(**values)
    except (OSError, ValueError, AttributeError) as e:
        raise InvalidValueError("generation_config", source, f"{path} is not usable ({e})",
                                "Give auto, none or a directory that holds a generation_config.json") from e
    return values


def _of_model(model: str) -> Path | None:
    """The file beside a model that is there: its directory, or the hub's cache."""
    directory = Path(model).expanduser()
    if directory.exists():
        path = directory / _FILE
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, _FILE)
    except HFValidationError:  # not a hub name: the embedded model
        return None
    return Path(cached) if isinstance(cached, str) else None
