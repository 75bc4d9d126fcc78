"""Which JSON schemas a grammar can hold an output to. What it would leave out without a word is refused here instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sparsespec.core.errors import InvalidValueError, UnsupportedError

MAX_DEPTH = 64
"""Most levels of a schema, lists and mappings counted: the compiler's time grows faster than they do."""

_FIELD = "structured_outputs.json"
_UNSUPPORTED = {
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "unevaluatedItems", "uniqueItems", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor",
}
_FORMATS = {
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference",
    "json-pointer", "relative-json-pointer",
}
_SCHEMA = {"items", "additionalProperties", "propertyNames", "unevaluatedProperties"}  # keywords that hold a schema,
_SCHEMA_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}  # a list of them,
_SCHEMA_MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # or a mapping to them


def parse_schema(source: str) -> dict[str, Any]:
    """The schema in a text, checked. Raises InvalidValueError or UnsupportedError (see the module).

    Annotations and keywords that JSON Schema does not know are let through, as the standard says. oneOf is taken as anyOf
    where its branches overlap.
    """
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as e:
        raise InvalidValueError(_FIELD, source, f"not JSON ({e})", "Give a JSON schema") from e
    if not isinstance(schema, dict):
        raise InvalidValueError(_FIELD, source, "not an object", "Give a JSON schema as an object")
    if _depth(schema) > MAX_DEPTH:
        raise InvalidValueError(_FIELD, source, f"nested deeper than {MAX_DEPTH} levels", "Flatten it, or use $ref")
    for part in _parts(schema):
        try:
            _check(part)
        except TypeError as e:
            raise InvalidValueError(_FIELD, part, f"a keyword's value is of the wrong kind ({e})", "See json-schema.org") from e
    return schema


def _depth(schema: Any) -> int:
    level, depth = [schema], 0
    while level:
        level = [child for node in level if isinstance(node, (dict, list))
                 for child in (node.values() if isinstance(node, dict) else node)]
        depth += 1
    return depth


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all within it; values of enum, const and the like are none."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for key, value in node.items():
            if key in _SCHEMA:
                stack += value if isinstance(value, list) else [value]
            elif key in _SCHEMA_LISTS and isinstance(value, list):
                stack += value
            elif key in _SCHEMA_MAPS and isinstance(value, dict):
                stack += value.values()


def _check(part: dict[str, Any]) -> None:
    for key in _UNSUPPORTED & part.keys():
        if part[key] is not False:  # uniqueItems: false asks for nothing
            raise UnsupportedError(f"{_FIELD}: {key}", part[key], "no grammar can hold an output to it", "Leave it out")
    if len(part.get("allOf") or ()) > 1:
        raise UnsupportedError(f"{_FIELD}: allOf", part["allOf"], "more than one branch", "Merge the branches")
    if "pattern" in part and ("minLength" in part or "maxLength" in part):
        raise UnsupportedError(f"{_FIELD}: pattern", part["pattern"], "together with minLength or maxLength",
                               "Put the length into the pattern")
    if part.get("format", "date") not in _FORMATS:
        raise UnsupportedError(f"{_FIELD}: format", part["format"], "not a known format", f"Known: {', '.join(sorted(_FORMATS))}")
    reference = part.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise UnsupportedError(f"{_FIELD}: $ref", reference, "outside the schema", "Put it under $defs, as #/$defs/name")
    missing = set(part.get("required") or ()) - set(part.get("properties") or ())
    if missing:
        raise UnsupportedError(f"{_FIELD}: required", sorted(missing), "not among the properties", "Describe them in properties")
