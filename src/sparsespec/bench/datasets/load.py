"""From what a user writes to a dataset: a shipped set, a local file, or a name of the `datasets` library.

    reasoning | code | longdoc | random          shipped sets, see shipped.py; random token ids
    FILE.json | .jsonl | .parquet                records of a public format, recognised by their fields
    FILE.txt | .py | .md | ...                   a text to continue
    aime=FILE, olympiadbench=hub:NAME[:CONFIG]   the same with the format named, or by name from the hub
    trace=aime                                   random prompts with the output lengths of reasoning models, see traces.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsespec.bench.datasets import shipped
from sparsespec.bench.datasets.build import Dataset
from sparsespec.bench.datasets.formats import FORMATS, Question, Record, questions
from sparsespec.bench.datasets.traces import trace
from sparsespec.core.errors import InvalidValueError, SparseSpecError, UnsupportedError

SHIPPED: dict[str, Callable[[], Dataset]] = {
    "reasoning": lambda: Dataset("reasoning", "chat", shipped.reasoning()),
    "code": lambda: Dataset("code", "text", shipped.code()),
    "longdoc": lambda: Dataset("longdoc", "document", shipped.documents()),
    "random": lambda: Dataset("random", "ids", []),
}
_TEXT = "text"


def load(spec: str) -> Dataset:
    """The dataset that `spec` names; see the module. Raises InvalidValueError or UnsupportedError that says what is wrong."""
    if spec in SHIPPED:
        return SHIPPED[spec]()
    form, _, source = spec.partition("=")
    if form == "trace" and source:
        return Dataset(spec, "trace", [], trace(source))
    if form in FORMATS or form == _TEXT:
        if not source:
            raise InvalidValueError("dataset", spec, "names a format and no source", f"Give {form}=FILE or {form}=hub:NAME")
    else:
        form, source = "", spec
    if source.startswith("hub:"):
        records, where = _from_hub(source), source
    else:
        path = Path(source).expanduser()
        if not path.is_file():
            raise InvalidValueError("dataset", spec, "neither a shipped set nor a file",
                                    f"Choose from {', '.join(SHIPPED)}, or give FILE, FORMAT=FILE or FORMAT=hub:NAME with FORMAT "
                                    f"one of {', '.join(FORMATS)}, {_TEXT}")
        if form == _TEXT or (not form and path.suffix.lower() not in _READERS):
            return Dataset(path.name, "text", [Question(path.name, _read_text(path))])
        records, where = read_records(path), str(path)
    label, found = questions(records, where, form or None)
    return Dataset(label if form else Path(where).stem, "chat", found)


def read_records(path: Path) -> list[Record]:
    """Records of a JSON, JSONL or Parquet file. Raises InvalidValueError, UnsupportedError for Parquet without pyarrow."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InvalidValueError("dataset", str(path), "its ending is none of " + ", ".join(_READERS), "Rename or convert it")
    try:
        records = reader(path)
    except SparseSpecError:
        raise
    except (OSError, ValueError) as e:  # JSON, Unicode and Arrow errors are ValueErrors
        raise InvalidValueError("dataset", str(path), f"not readable as {path.suffix[1:]} ({e})", "Download it again") from e
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise InvalidValueError("dataset", str(path), "not a list of records", "Give one object a record")
    return records


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidValueError("dataset", str(path), f"not readable as text ({e})", "Give a UTF-8 file") from e


def _json(path: Path) -> Any:
    """A list of records, or an object that holds exactly one such list ({"data": [...]})."""
    value = json.loads(path.read_text(encoding="utf-8"))
    lists = [v for v in value.values() if isinstance(v, list)] if isinstance(value, dict) else []
    return lists[0] if len(lists) == 1 else value


def _jsonl(path: Path) -> Any:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as e:
        raise UnsupportedError("dataset", str(path), "Parquet files need pyarrow", "Run pip install 'sparsespec[datasets]'") from e
    return parquet.read_table(path).to_pylist()


_READERS: dict[str, Callable[[Path], Any]] = {".json": _json, ".jsonl": _jsonl, ".parquet": _parquet}


def _from_hub(source: str) -> list[Record]:
    """Records of hub:NAME[:CONFIG]: the split "test" where there is one, else the first."""
    _, name, *config = source.split(":")
    try:
        import datasets
    except ImportError as e:
        raise UnsupportedError("dataset", source, "the datasets library is not installed",
                               "Run pip install 'sparsespec[datasets]', or give a local file") from e
    try:
        splits = datasets.load_dataset(name, *config)
    except Exception as e:  # network errors, missing names and script datasets have no common base
        raise InvalidValueError("dataset", source, f"the hub did not give it ({type(e).__name__}: {e})",
                                "Check the name, its configuration and the network, or give a local JSON, JSONL or Parquet file"
                                ) from e
    split = "test" if "test" in splits else next(iter(splits))
    return [dict(record) for record in splits[split]]
