"""Sets that are on every machine: our own problems, and text of the Python installation itself, read where it lies.

reasoning: the 16 problems of data/problems.json. code: large modules of the standard library, to be continued. longdoc:
the chapters of the Python language reference that `help()` shows (pydoc_data), to be summarised.
"""

from __future__ import annotations

import importlib.util
import json
from importlib.resources import files
from pathlib import Path

from sparsespec.bench.datasets.formats import Question
from sparsespec.core.errors import UnsupportedError

# Modules of more than 60 KB, written in Python, in every supported version.
_MODULES = ("argparse", "inspect", "tarfile", "typing", "doctest", "_pydecimal", "email._header_value_parser", "mailbox",
            "ipaddress", "subprocess", "pickletools", "difflib", "optparse", "logging", "enum", "unittest.mock")
_DOCUMENTS = 16


def problems() -> list[dict[str, str]]:
    """The reasoning problems shipped with the package: id, category, prompt."""
    loaded: list[dict[str, str]] = json.loads(files("sparsespec").joinpath("data/problems.json").read_text(encoding="utf-8"))
    return loaded


def reasoning() -> list[Question]:
    """The problems as questions."""
    return [Question(p["id"], p["prompt"]) for p in problems()]


def code() -> list[Question]:
    """Sources to continue; each goes on with the next module, so that any length can be had. Raises UnsupportedError."""
    sources = [(name, _source(name)) for name in _MODULES]
    return [Question(name, "\n\n".join(text for _, text in sources[i:] + sources[:i])) for i, (name, _) in enumerate(sources)]


def documents() -> list[Question]:
    """Long documents: the topics in alphabetical order, each document from another one on. Raises UnsupportedError."""
    try:
        from pydoc_data.topics import topics
    except ImportError as e:
        raise UnsupportedError("dataset", "longdoc", "this Python comes without pydoc_data", "Use code, or give a text file") from e
    names = sorted(topics)
    starts = [len(names) * i // _DOCUMENTS for i in range(_DOCUMENTS)]
    return [Question(names[s], "\n\n".join(topics[name].strip() for name in names[s:] + names[:s])) for s in starts]


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UnsupportedError("dataset", "code", f"this Python comes without the source of {module}", "Give a text file")
    return Path(spec.origin).read_text(encoding="utf-8")
