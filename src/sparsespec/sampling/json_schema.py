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
_TYPED = {  # what says something about values of one type alone, and nothing to xgrammar if no type is given
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "format",
}
_BRANCHES = ("anyOf", "oneOf", "allOf")
_ALONE = ("enum", "const", "$ref", *_BRANCHES)  # what xgrammar looks at first, and then at nothing else
_VALIDATION = _TYPED | {
    "type", "items", "prefixItems", "minItems", "maxItems", "properties", "required", "additionalProperties", "minProperties",
    "maxProperties", "patternProperties", "propertyNames", "unevaluatedProperties", *_ALONE,
}
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),), "array": (list,),
    "object": (dict,),
}
_SCHEMA = {"items", "additionalProperties", "propertyNames", "unevaluatedProperties"}  # keywords that hold a schema,
_SCHEMA_LISTS = {*_BRANCHES, "prefixItems"}  # a list of them,
_SCHEMA_MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # or a mapping to them


def parse_schema(source: str) -> dict[str, Any]:
    """The schema in a text, checked. Raises InvalidValueError or UnsupportedError (see the module).

    Annotations and keywords that JSON Schema does not know are let through, as the standard says. What xgrammar itself
    warns of, such as branches of oneOf that overlap, is refused when the grammar is tried (see trial.py).
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
        except (TypeError, KeyError) as e:
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
    for first in [key for key in _ALONE if key in part][:1]:
        for key in sorted(_VALIDATION & part.keys() - {first}):
            if key != "type" or not _agrees(part[key], first, part[first]):
                raise UnsupportedError(f"{_FIELD}: {key}", part[key], f"beside {first}, which alone would hold",
                                       "Make one of them")
    for key in sorted(_TYPED & part.keys()):
        if "type" not in part:
            raise UnsupportedError(f"{_FIELD}: {key}", part[key], "without a type", "Say which type it is for")
    for key, other in (("pattern", "format"), ("propertyNames", "properties"), ("propertyNames", "patternProperties")):
        if key in part and other in part:
            raise UnsupportedError(f"{_FIELD}: {key}", part[key], f"together with {other}", "Give one of them")
    if part.get("format", "date") not in _FORMATS:
        raise UnsupportedError(f"{_FIELD}: format", part["format"], "not a known format", f"Known: {', '.join(sorted(_FORMATS))}")
    reference = part.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise UnsupportedError(f"{_FIELD}: $ref", reference, "outside the schema", "Put it under $defs, as #/$defs/name")
    missing = set(part.get("required") or ()) - set(part.get("properties") or ())
    if missing:
        raise UnsupportedError(f"{_FIELD}: required", sorted(missing), "not among the properties", "Describe them in properties")


def _agrees(kind: Any, key: str, value: Any) -> bool:
    """Whether a schema's type asks for nothing that is not in its enum, const or branches already."""
    if key in ("enum", "const"):
        allowed = tuple(t for k in ([kind] if isinstance(kind, str) else kind) for t in _TYPES[k])
        return all(isinstance(v, allowed) and (not isinstance(v, bool) or bool in allowed)
                   for v in (value if key == "enum" else [value]))
    return key in _BRANCHES and all(isinstance(branch, dict) and branch.get("type") == kind for branch in value)
