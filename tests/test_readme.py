"""The README is true: its Python and its commands run, its make targets and links exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = [body for kind, body in BLOCKS if kind == "python"]
SHELL = [line.split("  #")[0].strip() for kind, body in BLOCKS if kind == "bash" for line in body.splitlines() if line.strip()]
COMMANDS = [line for line in SHELL if not line.startswith("make ")]
# One thread: on a busy machine threads that wait for each other make a small model many times slower.
ENV = {"OMP_NUM_THREADS": "1", **os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def check(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_blocks_were_found() -> None:
    assert len(PYTHON) >= 2
    assert len(COMMANDS) >= 4
    assert all("sparsespec " in command for command in COMMANDS)


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.strip().splitlines()[-1][:40])
def test_python_runs(code: str) -> None:
    check([sys.executable, "-c", code])


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command: str) -> None:
    assert check(["bash", "-euo", "pipefail", "-c", command]).strip()


def test_make_targets_exist() -> None:
    named = [line.split()[1] for line in SHELL if line.startswith("make ")]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_result_table_is_a_captured_one() -> None:
    """The table between the marks is real output of `make run`, with the losslessness line."""
    table = re.search(r"<!-- result table -->\n```text\n(.*?)```\n<!-- /result table -->", TEXT, re.DOTALL)
    assert table
    assert "tokens/s" in table[1]
    assert "outputs identical: yes" in table[1]
