"""`sparsespec plan`: documents, tables, pictures and errors, all without torch."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from sparsespec.cli.main import main
from sparsespec.cli.plan import VARIED
from sparsespec.plan.report import Report
from sparsespec.plan.study import STUDIES

QUICK = ("plan", "--simulate", "--requests", "60", "--mean-output-len", "200", "--kv-cache-tokens", "5000", "--max-output-len",
         "900")


DOC = (Path(__file__).parent.parent / "docs" / "plan.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"^```bash\n(.*?)^```$", DOC, re.MULTILINE | re.DOTALL) for line in block.splitlines()]


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_formula_document(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "plan", "--num-speculative-tokens", "16", "--alpha", "0.75", "--batch-size", "64")
    assert set(found) == {"gpu", "derived", "model", "products_scaled_from", "sources", "draft", "point", "gains", "best_k"}
    assert [g["k"] for g in found["gains"]] == list(range(17))
    assert set(found["gains"][0]) == {"k", "tokens", "rows", "iteration_ms", "token_ms", "attention_gain", "formula", "gain"}
    assert found["gains"][16]["attention_gain"] == pytest.approx(7.22, abs=0.005)


def test_simulation_document(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *QUICK, "--gpu", "h100")
    assert set(found) == {"gpu", "derived", "model", "products_scaled_from", "sources", "draft", "load", "groups", "factors"}
    assert found["derived"] is True
    assert {name: len(runs) for name, runs in found["groups"].items()} == {"KV policies": 4, "ablation": 8}
    keys = {f.name for f in fields(Report)} | {"throughput", "recomputed_share"}
    for runs in found["groups"].values():
        for r in runs:
            assert set(r) == keys
            assert r["requests"] == 60
    assert [f["paper"] for f in found["factors"][:4]] == [1.23, 1.61, 1.12, 2.22]


def test_exact_engine_and_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    exact = document(capsys, *QUICK, "--engine", "exact", "--verification", "sync")
    fluid = document(capsys, *QUICK, "--verification", "sync", "--study", "one")
    a, b = (d["groups"]["simulation"][0] for d in (exact, fluid))
    assert a["throughput"] == pytest.approx(b["throughput"], rel=0.06)
    fleet = document(capsys, *QUICK, "--replicas", "3", "--study", "routers", "--request-rate", "30")
    assert [r["name"] for r in fleet["groups"]["routers"]] == ["round_robin", "random", "two_choices", "least_requests", "least_kv"]


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    out = capsys.readouterr().out
    assert "best: k = 8" in out
    assert "measured" in out
    assert main([*QUICK, "--gpu", "h100", "--model", "qwen3-1.7b"]) == 0
    out, err = capsys.readouterr()
    for text in ("derived, not measured; products scaled from qwen3-8b", "KV policies", "ablation", "pool use", "latency p99",
                 "1.61x"):
        assert text in out
    assert "recompute" in err


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    assert main([*QUICK, "--study", "figure5", "--plot", str(path)]) == 0
    assert "offload" in path.read_text()
    assert main([*QUICK, "--study", "one", "--plot", str(tmp_path / "none" / "plan.svg")]) == 2
    assert "plot" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "named"), [
    (["--gpu", "abacus"], "gpu"), (["--model", "gpt"], "model"), (["--acceptance", "2"], "acceptance"),
    (["--alpha", "-1"], "alpha"),
    (["--requests", "5"], "--simulate"), (["--simulate", "--alpha", "0.5"], "--alpha"), (["--plot", "x.png"], "--plot"),
    (["--simulate", "--requests", "0"], "requests"), (["--simulate", "--lengths-file", "/no/such/file"], "lengths_file"),
    (["--simulate", "--schedule", "lockstep"], "lockstep"), (["--simulate", "--reserve-tokens", "9"], "reserve_tokens"),
    (["--simulate", "--study", "figure5", "--kv-policy", "offload"], "--kv-policy"), (["--simulate", "--engine", "exact"], "exact"),
    (["--simulate", "--kv-cache-tokens", "500", "--requests", "4"], "kv_cache_tokens"),
])
def test_errors_are_one_line(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert named in last


def test_no_torch_and_the_names_match() -> None:
    assert list(STUDIES) == list(VARIED)
    code = ("import sys\nfrom sparsespec.cli.main import build_parser, main\nbuild_parser()\n"
            "heavy = [n for n in ('torch', 'numpy', 'rich') if n in sys.modules]\n"
            f"main({[*QUICK, '--json', '--study', 'figure5']!r})\nprint(heavy, 'torch' in sys.modules)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[] False"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_documentations_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    program, *argv = shlex.split(command)
    assert program == "sparsespec"
    assert main(argv) == 0
    assert capsys.readouterr().out.strip()


def test_the_documentation_names_every_gpu() -> None:
    assert len(COMMANDS) >= 6
    for path in (Path(__file__).parent.parent / "src" / "sparsespec" / "plan" / "gpus").glob("*.json"):
        assert f"`{path.stem}`" in DOC
