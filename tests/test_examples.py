"""The examples run, show the same text whichever way it was drafted, and stay short."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sparsespec.loader.loaded import LoadedModel
from sparsespec.spec import registry

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.usefixtures("one_thread")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["triforce", "quest"])
def test_on_the_default_model(name: str, smol: LoadedModel, capsys: pytest.CaptureFixture[str],
                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "POLICIES", dict(registry.POLICIES))
    module = load(name)
    if hasattr(module, "POLICIES"):
        monkeypatch.setattr(module, "POLICIES", registry.POLICIES)
    ids = module.main(smol, 8)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ids) >= 4
    assert all(other == ids[0] for other in ids)
    assert len(ids[0]) == 8


def test_eagle3() -> None:
    ids = load("eagle3").main(max_tokens=24)
    assert len(ids) == 3
    assert all(other == ids[0] for other in ids)


def test_as_a_command() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / "eagle3.py")], capture_output=True, text=True, check=True, timeout=120)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["none", "eagle3", "hierarchy"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 40
