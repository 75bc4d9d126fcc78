"""The laboratory: its figures against hand-made cases, its matrix, both commands from end to end, and prompts computed once."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sparsespec import LLM, SamplingParams
from sparsespec.bench.datasets import SHIPPED
from sparsespec.bench.lab import run as lab
from sparsespec.bench.lab.matrix import BASELINE, make_cells
from sparsespec.bench.lab.options import AcceptanceOptions, SweepOptions
from sparsespec.bench.lab.plots import draw
from sparsespec.bench.lab.predict import GPUS, Costs, Round, Scenario, scenario
from sparsespec.bench.lab.tally import Tally, Verification
from sparsespec.bench.prefill import PromptCache
from sparsespec.cli.bench_lab import options_from
from sparsespec.cli.main import build_parser, main
from sparsespec.core.errors import CapacityError, InvalidValueError, UnsupportedError
from sparsespec.loader.loaded import LoadedModel
from sparsespec.spec.none import NoDraft
from sparsespec.spec.registry import POLICIES
from sparsespec.testing import tiny_qwen3

# --- the speed-up model ----------------------------------------------------------------------------------------------


class OnlyAttention(Costs):
    """A GPU whose matrix products are free."""

    def gemm(self, rows: float) -> float:
        return 0.0


def self_draft(k: int, alpha: float, s: float) -> Round:
    return Round(passes=k + 1, rows=2 * k + 1, tokens=k * alpha + 1, kv_share=(k * s + 1) / (k * alpha + 1))


def h200(loaded: LoadedModel, batch: int = 128, context: int | None = 8192) -> Scenario:
    return scenario("h200", "qwen3-8b", batch, context, loaded)


def test_attention_alone_gains_what_the_paper_says(tiny_models: dict[str, LoadedModel]) -> None:
    where = Scenario("", "", OnlyAttention(GPUS["h200"], tiny_models["qwen3"].config), 128, 8192)
    assert where.speedup(self_draft(16, 0.75, 0.05), 1.0) == pytest.approx(13 / 1.8)


def test_a_self_draft_gives_the_closed_form(tiny_models: dict[str, LoadedModel]) -> None:
    where, k, alpha, s = h200(tiny_models["qwen3"]), 8, 0.77, 0.05
    gemm, attention = where.costs.gemm, where.costs.attention(128 * 8192)
    rounds = (k + 1) / (k * alpha + 1) * (gemm((2 * k + 1) / (k + 1) * 128) + (k * s + 1) / (k + 1) * attention)
    assert where.speedup(self_draft(k, alpha, s), 1.0) == pytest.approx((gemm(128) + attention) / rounds)
    assert where.speedup(self_draft(k, alpha, s), 1.0) > 2
    assert where.speedup(Round(1, 1, 1, 1), 1.0) == 1.0


def test_costs_are_the_measured_ones(tiny_models: dict[str, LoadedModel]) -> None:
    costs = h200(tiny_models["qwen3"]).costs
    assert costs.gemm(128) == pytest.approx(5.0)
    assert costs.gemm(160) == pytest.approx(5.65)
    assert costs.gemm(4096) == pytest.approx(92.8)  # past the curve
    assert costs.attention(128 * 4096) == pytest.approx(17.9, abs=0.1)
    assert costs.attention(1) * 4.33e9 == pytest.approx(147456)  # bytes a token of Qwen3-8B in bfloat16
    assert Costs(GPUS["h200"], tiny_models["qwen3"].config).gemm(1) < 0.001
    measured = h200(tiny_models["qwen3"], context=None)
    assert measured.speedup(self_draft(8, 0.7, 0.05), 16384) > measured.speedup(self_draft(8, 0.7, 0.05), 1024)


def test_a_curve_from_a_file(tiny_models: dict[str, LoadedModel], tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    curve = {"name": "mine", "rows": [1, 100], "milliseconds": [1, 2], "parameters": 1e9, "read_bytes_per_second": 1e12}
    path.write_text(json.dumps(curve))
    loaded = tiny_models["qwen3"]
    assert scenario(str(path), "this", 1, None, loaded).costs.gpu.name == "mine"
    assert scenario("h200", str(tiny_qwen3()), 1, None, loaded).costs.kv_bytes == loaded.config.kv_bytes_per_token(2)
    for wrong in ({**curve, "rows": [1]}, {**curve, "rows": [100, 1]}, {**curve, "parameters": 0}, {"name": "mine"},
                  {**curve, "colour": 1}, [1]):
        path.write_text(json.dumps(wrong))
        with pytest.raises(InvalidValueError, match="gpu"):
            scenario(str(path), "this", 1, None, loaded)
    with pytest.raises(InvalidValueError, match="h200"):
        scenario("h9000", "this", 1, None, loaded)


# --- figures and matrix ------------------------------------------------------------------------------------------------


def test_figures_of_a_hand_made_tally() -> None:
    tally = Tally([Verification(100, 4, 4, 5), Verification(105, 4, 1, 2), Verification(300, 2, 0, 1)], passes=13, rows=23,
                  kv_bytes=5000)
    f = tally.figures(kv_bytes_per_token=10, bucket=256)
    assert (f["tokens"], f["verifications"]) == (8, 3)
    assert (f["drafted"], f["accepted"]) == (pytest.approx(10 / 3), pytest.approx(5 / 3))
    assert f["accepted_by_position"] == [pytest.approx(2 / 3), pytest.approx(1 / 3), 0.5, 0.5]
    assert f["accepted_by_context"] == [{"from": 0, "to": 256, "verifications": 2, "accepted": 2.5},
                                        {"from": 256, "to": 512, "verifications": 1, "accepted": 0.0}]
    assert (f["tokens_per_target_pass"], f["tokens_per_weight_pass"]) == (pytest.approx(8 / 3), pytest.approx(8 / 13))
    assert f["kv_bytes_per_token"] == 625
    contexts = [100, 101, 102, 103, 104, 105, 106, 300]  # what plain decoding reads for the same tokens
    assert f["mean_context"] == pytest.approx(sum(contexts) / 8)
    assert f["kv_share"] == pytest.approx(500 / sum(contexts))
    empty = Tally().figures(10, 256)
    assert empty["accepted"] is None
    assert empty["accepted_by_position"] == []


def test_the_matrix() -> None:
    policies = ("none", "pillar", "pillar:score_rows=accepted,min_budget=64")
    cells = make_cells(AcceptanceOptions(policies=policies, k=(4, 8), s=(0.1,)))
    assert [(c.policy, c.k, c.s) for c in cells] == [
        ("none", None, None), ("pillar", 4, 0.1), ("pillar", 8, 0.1),
        ("pillar:score_rows=accepted,min_budget=64", 4, 0.1), ("pillar:score_rows=accepted,min_budget=64", 8, 0.1)]
    assert cells[0] == BASELINE
    config = cells[-1].config({"min_budget": 32, "verification": "sync"})
    assert config == {"method": "pillar", "num_speculative_tokens": 8, "sparse_attn_ratio": 0.1, "adaptive": False,
                      "schedule": "lockstep", "min_budget": 64, "score_rows": "accepted", "verification": "sync"}
    assert cells[1].config({})["min_budget"] == 128  # the same for every policy, whatever its own preset is
    assert {c.method for c in make_cells(AcceptanceOptions(policies=("all",)))} == set(POLICIES)
    for policy in ("vibes", "pillar:score_rows", "vibes:x=1"):
        with pytest.raises(InvalidValueError, match="policies"):
            make_cells(AcceptanceOptions(policies=(policy,)))


def test_a_sweep_shares_its_crossing_point() -> None:
    cells = make_cells(SweepOptions())
    assert [(c.k, c.s, c.curve) for c in cells] == [
        (4, 0.05, "k"), (8, 0.05, "ks"), (12, 0.05, "k"), (16, 0.05, "k"), (20, 0.05, "k"),
        (8, 0.1, "s"), (8, 0.15, "s"), (8, 0.2, "s"), (8, 0.25, "s")]


def test_no_s_where_nothing_is_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copies(NoDraft):
        name = "copies"
        selects = False

    monkeypatch.setitem(POLICIES, "copies", Copies)
    cells = make_cells(AcceptanceOptions(policies=("copies",), k=(2, 3), s=(0.1, 0.2)))
    assert [(c.k, c.s) for c in cells] == [(2, None), (3, None)]
    assert "sparse_attn_ratio" not in cells[0].config({})
    with pytest.raises(InvalidValueError, match="no s to sweep"):
        make_cells(SweepOptions(policies=("copies",)))


@pytest.mark.parametrize("values", [{"k": (0,)}, {"s": (-0.1,)}, {"k": ()}, {"policies": ()}, {"num_prompts": 0},
                                    {"contexts": (0,)}, {"temperatures": ()}, {"datasets": ()}, {"gpu_context": 0},
                                    {"context_bucket": 0}])
def test_wrong_options(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError):
        AcceptanceOptions(**values)


# --- prompts computed once ---------------------------------------------------------------------------------------------

PROMPTS = [[(7 * i + j) % 251 for i in range(90 + 40 * j)] for j in range(3)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("recompute", [1, 64, 1000])
@pytest.mark.parametrize("method", ["none", "pillar"])
def test_seated_prompts_decode_as_others_do(method: str, recompute: int, tiny_models: dict[str, LoadedModel]) -> None:
    loaded, params = tiny_models["qwen3"], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    spec = {"method": method, "adaptive": False, "min_budget": 16, "num_speculative_tokens": 4}
    llm = LLM(loaded, speculative_config=spec, max_num_seqs=3, kv_cache_tokens=1024)
    wanted = [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)]
    cache, fresh = PromptCache(loaded), LLM(loaded, speculative_config=spec, max_num_seqs=3, kv_cache_tokens=1024)
    requests = cache.seat(fresh, PROMPTS, params, recompute)
    while fresh.engine.has_work():
        fresh.engine.step()
    assert [r.output_token_ids for r in requests] == wanted
    assert cache.kv(PROMPTS[0]) is cache.kv(PROMPTS[0])


def test_prompts_that_do_not_fit_at_once(tiny_models: dict[str, LoadedModel]) -> None:
    llm = LLM(tiny_models["qwen3"], speculative_config={"method": "none"}, max_num_seqs=3, kv_cache_tokens=256)
    with pytest.raises(CapacityError, match="of 3 prompts fit"):
        PromptCache(tiny_models["qwen3"]).seat(llm, PROMPTS, SamplingParams(max_tokens=2))


# --- the commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tiny_models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch, one_thread: None) -> list[str]:
    """Flags of a run on a tiny model that was loaded once."""
    monkeypatch.setattr("sparsespec.engine.engine.load_model", lambda *_, **__: tiny_models["qwen3"])
    return ["--datasets", "random", "--num-prompts", "2", "--max-tokens", "24", "--context-bucket", "16",
            "--speculative-config.min-budget", "16"]


def read(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_acceptance(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "acceptance", *tiny, "--policies", "pillar", "none", "--k", "3", "--s", "0.05", "1.0",
            "--contexts", "80", "160", "--temperatures", "0", "1"]
    assert main([*argv, "--json", "--plot", str(tmp_path / "plots")]) == 0
    found = read(capsys)
    assert found["options"]["contexts"] == [80, 160]
    assert found["scenario"] == {"gpu": "h200", "model": "qwen3-8b", "batch": 128, "context": None}
    assert found["left_out"] == {}
    assert [(c["context"], c["temperature"], c["policy"], c["s"]) for c in found["cells"]] == [
        (n, t, p, s) for n in (80, 160) for t in (0.0, 1.0) for p, s in (("none", None), ("pillar", 0.05), ("pillar", 1.0))]
    for c in found["cells"]:
        assert c["prompts"] == 2
        assert c["prompt_tokens"] == c["context"]
        assert c["tokens"] >= 2 * 23  # the first token of each is the prompt's
        assert sum(b["verifications"] for b in c["accepted_by_context"]) == c["verifications"]
        if c["policy"] == "none":
            assert (c["k"], c["tokens_per_target_pass"], c["tokens_per_weight_pass"], c["kv_share"]) == (None, 1, 1, 1)
            assert c["predicted_speedup"] == pytest.approx(1)
            assert c["accepted_by_position"] == []
            assert c["lossless"] is None
        else:
            assert c["drafted"] == c["k"] == 3  # no round is cut short
            assert c["tokens_per_target_pass"] == pytest.approx(c["accepted"] + 1)
            assert c["tokens_per_weight_pass"] == pytest.approx((c["accepted"] + 1) / 4)
            assert c["rows_per_weight_pass"] == pytest.approx(7 / 4)
            assert sum(c["accepted_by_position"]) == pytest.approx(c["accepted"])
            assert c["lossless"] is (True if c["temperature"] == 0 else None)
        if c["s"] == 1.0 and c["temperature"] == 0:
            assert c["accepted"] == 3  # a draft that sees everything is the target
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == [
        "accepted.png", "accepted_by_context.png", "accepted_by_position.png", "kv_bytes_per_token.png", "predicted_speedup.png",
        "tokens_per_target_pass.png", "tokens_per_weight_pass.png"]


def test_acceptance_as_tables(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "acceptance", *tiny, "--contexts", "100", "--k", "2", "--policies", "all"]) == 0
    out = capsys.readouterr().out
    assert "random, 2 prompts of 100 tokens, temperature 0" in out
    assert "pillar" in out
    assert "lossless: yes" in out
    assert "predicted: qwen3-8b on h200" in out


def test_prefill_reused_or_not_gives_the_same_rounds(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "acceptance", *tiny, "--policies", "pillar", "--contexts", "200", "--k", "4", "--s", "0.1", "--json"]
    figures = []
    for flag in ("--reuse-prefill", "--no-reuse-prefill"):
        assert main([*argv, flag]) == 0
        figures.append(read(capsys)["cells"][-1])
    for c in figures:
        del c["seconds"]
    assert figures[0] == figures[1]


def test_all_leaves_out_what_the_engine_refuses(tiny: list[str], monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    class Refuses(NoDraft):
        name = "refuses"

        def __init__(self, *_: Any) -> None:
            raise UnsupportedError("speculative_config.model", None, "needs a draft head", "Name one")

    monkeypatch.setitem(POLICIES, "refuses", Refuses)
    argv = ["bench", "acceptance", *tiny, "--contexts", "40", "--max-tokens", "6", "--k", "2"]
    assert main([*argv, "--policies", "all", "--json"]) == 0
    found = read(capsys)
    assert "needs a draft head" in found["left_out"]["refuses"]
    assert "refuses" not in {c["policy"] for c in found["cells"]}
    assert main([*argv, "--policies", "refuses"]) == 2
    assert "needs a draft head" in capsys.readouterr().err


def test_a_lossy_cell_is_reported(tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = lab.Laboratory.decode

    def broken(self: lab.Laboratory, cell: Any, *args: Any) -> Any:
        tally, outputs = original(self, cell, *args)
        if cell.drafts:
            outputs[1][3] = (outputs[1][3] + 1) % 256
        return tally, outputs

    monkeypatch.setattr(lab.Laboratory, "decode", broken)
    assert main(["bench", "acceptance", *tiny, "--contexts", "40", "--max-tokens", "6", "--k", "2", "--policies", "pillar"]) == 1
    assert "lossless: no (0 of 1" in capsys.readouterr().out


def test_sweep(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "sweep", *tiny, "--contexts", "120", "--sweep-k", "2", "--sweep-s", "0.3", "--at-k", "2", "--at-s", "0.1"]
    assert main([*argv, "--json", "--plot", str(tmp_path)]) == 0
    cells = read(capsys)["cells"]
    assert [(c["policy"], c["k"], c["s"], c["curve"]) for c in cells] == [
        ("none", None, None, ""), ("pillar", 2, 0.1, "k"), ("pillar", 2, 0.3, "s")]
    assert all(c["lossless"] for c in cells[1:])
    assert {"sweep_k.png", "sweep_s.png"} <= {p.name for p in tmp_path.iterdir()}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in tmp_path.iterdir())


def test_plots_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"sparsespec\[bench\]"):
        draw([], tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize("flags", [["--max-num-seqs", "4"], ["--kv-cache-tokens", "100"], ["--speculative-config.method", "pillar"],
                                   ["--speculative-config.num-speculative-tokens", "3"]])
def test_settings_that_the_benchmark_makes_itself(flags: list[str], tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "acceptance", *tiny, *flags]) == 2
    assert "set by the benchmark" in capsys.readouterr().err


def test_answers_are_written_out_to_a_context(smol: LoadedModel, monkeypatch: pytest.MonkeyPatch, one_thread: None,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sparsespec.engine.engine.load_model", lambda *_, **__: smol)
    assert main(["bench", "acceptance", "--datasets", "reasoning", "--contexts", "72", "--num-prompts", "1", "--max-tokens", "6",
                 "--policies", "pillar", "--k", "2", "--json"]) == 0
    plain, pillar = read(capsys)["cells"]
    assert plain["prompt_tokens"] == pillar["prompt_tokens"] == 72
    assert plain["dataset"] == "reasoning"
    assert pillar["lossless"] is True
    assert pillar["accepted"] > 1


def test_the_documented_commands_are_understood() -> None:
    text = (Path(__file__).parent.parent / "docs" / "bench.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    commands = [line.split() for block in blocks for line in block.splitlines() if line.startswith("sparsespec ")]
    assert len(commands) >= 6
    for command in commands:
        args = build_parser().parse_args(command[1:])
        if hasattr(args, "options"):
            assert make_cells(options_from(args))
    for name in re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE):
        assert name in SHIPPED
