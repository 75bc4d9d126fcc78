"""JSON as the server writes it: compact UTF-8, from plain data."""

from __future__ import annotations

import json
from typing import Any

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def json_bytes(value: Any) -> bytes:
    """`value` as a body. Half a surrogate pair, which UTF-8 cannot hold, becomes a question mark."""
    return encode(value).encode("utf-8", "replace")
