"""The planner's cost model and formula, and the lengths that simulations draw."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsespec.core.errors import InvalidValueError, UnknownFieldError, UnsupportedError
from sparsespec.plan.costs import MODELS, CostModel, Gpu, load_model, product_weights
from sparsespec.plan.options import DraftOptions, FormulaOptions, LoadOptions, SystemOptions
from sparsespec.plan.speedup import attention_gain, best, gains
from sparsespec.plan.workload import make_load

H200 = CostModel(Gpu.load("h200"), load_model("qwen3-8b"))
GPUS = Path(__file__).parent.parent / "src" / "sparsespec" / "plan" / "gpus"


def test_products_follow_the_measured_points_and_grow_beyond_them() -> None:
    for rows, ms in ((1, 4.7), (128, 5.0), (256, 6.5), (2048, 46.4)):
        assert H200.gemm(rows) == pytest.approx(ms)
    assert H200.gemm(160) == pytest.approx((5.0 + 6.3) / 2)
    assert H200.gemm(4096) == pytest.approx(2 * 46.4)
    assert H200.gemm(0) == 0
    curve = [H200.gemm(rows) for rows in range(1, 5000, 7)]
    assert (np.diff(curve) >= 0).all()


@pytest.mark.parametrize(("batch", "context", "ms"), [(64, 2048, 10.8), (64, 8192, 24.5), (96, 7680, 32.7), (128, 4096, 25.5),
                                                       (192, 3072, 29.6)])
def test_plain_steps_are_the_measured_ones(batch: int, context: int, ms: float) -> None:
    """vLLM's decode steps on one H200."""
    assert H200.gemm(batch) + H200.overhead() + H200.attention(batch * context) == pytest.approx(ms, rel=0.03)


def test_kv_pool_and_transfer_have_the_measured_sizes() -> None:
    assert H200.kv_bytes == 147456
    assert H200.pool_tokens() == pytest.approx(822_000, rel=0.002)
    assert H200.transfer(128) == pytest.approx(128 * 147456 / 55e9 * 1e3)


def test_gathered_and_scored_reading_cost_more() -> None:
    full = H200.attention(100_000)
    assert H200.attention(0, 100_000) == pytest.approx(full / 0.94, rel=0.02)
    assert H200.attention(100_000, scored=True) == pytest.approx(full * 1.06, rel=0.02)
    assert H200.attention(0) == 0


def test_causal_prefill_sums_over_its_chunks() -> None:
    whole = H200.prefill_attention(1000, 1000)
    assert H200.prefill_attention(400, 400) + H200.prefill_attention(600, 1000) == pytest.approx(whole)


def test_other_models_scale_by_weights() -> None:
    assert product_weights(MODELS["qwen3-8b"]) == pytest.approx(7.57e9, rel=0.001)
    small = CostModel(Gpu.load("h200"), load_model("qwen3-1.7b"))
    assert small.scaled_from == "qwen3-8b"
    assert H200.scaled_from is None
    share = product_weights(MODELS["qwen3-1.7b"]) / product_weights(MODELS["qwen3-8b"])
    assert small.gemm(300) == pytest.approx(share * H200.gemm(300))
    assert small.pool_tokens() > H200.pool_tokens()


def test_every_shipped_gpu_says_where_its_figures_come_from() -> None:
    assert not Gpu.load("h200").derived
    assert Gpu.load("h100").derived
    for path in GPUS.glob("*.json"):
        values = json.loads(path.read_text())
        assert set(values["sources"]) == set(values) - {"name", "derived", "sources", "workspace_gib"}, path.name


def edited(**changes: Any) -> dict[str, Any]:
    values = json.loads((GPUS / "h200.json").read_text())
    return {key: value for key, value in {**values, **changes}.items() if value is not ...}


@pytest.mark.parametrize(("changes", "named"), [
    ({"memory_gib": ...}, "memory_gib"), ({"memory_gib": -1}, "memory_gib"), ({"bogus": 1}, "bogus"), ({"cpu_ms": 3}, "cpu_ms"),
    ({"cpu_ms": {"base": 1, "per_request": "x"}}, "per_request"), ({"gemm": {}}, "gemm"), ({"gemm": {"gpt": {}}}, "gemm"),
    ({"gemm": {"qwen3-8b": {"rows": [1, 1], "ms": [1, 2]}}}, "ascending"),
    ({"gemm": {"qwen3-8b": {"rows": [1, 2], "ms": [1]}}}, "gemm.qwen3-8b.ms"),
    ({"attention": {"gigabytes": [], "gigabytes_per_second": []}}, "attention.gigabytes"), ({"attention": [1]}, "attention"),
])
def test_a_wrong_gpu_file_is_refused_with_the_key(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(edited(**changes)))
    with pytest.raises(InvalidValueError, match=named):
        Gpu.load(str(path))


def test_an_edited_gpu_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(edited(host_link_gigabytes_per_second=10)))
    assert CostModel(Gpu.load(str(path)), load_model("qwen3-8b")).transfer(1000) == pytest.approx(5.5 * H200.transfer(1000))
    path.write_text("[1]")
    with pytest.raises(InvalidValueError, match="JSON object"):
        Gpu.load(str(path))
    for load, field in ((Gpu.load, "gpu"), (load_model, "model")):
        with pytest.raises(InvalidValueError, match=field):
            load("no-such-thing")


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="weights take"):
        CostModel(replace(Gpu.load("h100"), memory_gib=16), load_model("qwen3-8b")).pool_tokens()


# -- the formula -------------------------------------------------------------------------------------------------


def test_the_papers_attention_only_example() -> None:
    assert attention_gain(16, 0.75, 0.05) == pytest.approx(7.22, abs=0.005)


def test_the_formula_is_the_attention_gain_where_only_kv_costs() -> None:
    gpu = replace(Gpu.load("h200"), gemm={"qwen3-8b": {"rows": [1], "ms": [1e-12]}}, scoring_overhead=0.0, sparse_efficiency=1.0,
                  step_overhead_ms=0.0, attention={"gigabytes": [1], "gigabytes_per_second": [4000]})
    costs = CostModel(gpu, load_model("qwen3-8b"))
    for g in gains(costs, 64, 100_000, 0.05, [1.0] * 16, alpha=0.75)[1:]:
        assert g.formula == pytest.approx(attention_gain(g.k, 0.75, 0.05), rel=1e-6)
        assert g.gain == pytest.approx(g.formula, rel=0.01)  # but for the drafts' own entries


def test_formula_by_hand() -> None:
    """k = 8, α = 0.75, s = 0.05, 128 × 8192 on the H200: T_spec and η of the paper's model."""
    g = gains(H200, 128, 8192, 0.05, [0.9] * 8, alpha=0.75)[8]
    kv = 128 * 8192
    spec = 9 / 7 * (H200.gemm(17 / 9 * 128) + H200.attention(1.4 / 9 * kv))
    assert g.formula == pytest.approx((H200.gemm(128) + H200.attention(kv)) / spec)
    assert g.tokens == pytest.approx(7.0)


def test_best_k_follows_acceptance_and_context() -> None:
    def top(acceptance: float, context: int) -> int:
        return best(gains(H200, 128, context, 0.05, [acceptance] * 16, None, 128)).k

    assert top(0.97, 16384) > top(0.7, 16384) > 0
    assert top(0.05, 256) == 0


def test_default_acceptance_is_the_papers() -> None:
    assert np.cumprod(DraftOptions().profile).sum() == pytest.approx(6.16, abs=0.01)
    assert DraftOptions(acceptance="0.9, 0.5", num_speculative_tokens=4).profile == (0.9, 0.5, 0.5, 0.5)


@pytest.mark.parametrize(("make", "field"), [
    (lambda: DraftOptions(acceptance="1.2"), "acceptance"), (lambda: DraftOptions(acceptance="0.9,,0.8"), "acceptance"),
    (lambda: DraftOptions(num_speculative_tokens=0), "num_speculative_tokens"), (lambda: FormulaOptions(alpha=2.0), "alpha"),
    (lambda: FormulaOptions(batch_size=0), "batch_size"), (lambda: LoadOptions(requests=0), "requests"),
    (lambda: LoadOptions(request_rate=0.0), "request_rate"), (lambda: LoadOptions(dataset="gsm8k"), "dataset"),
    (lambda: SystemOptions(router="sticky"), "router"), (lambda: SystemOptions(replicas=0), "replicas"),
])
def test_wrong_settings_are_refused(make: Any, field: str) -> None:
    with pytest.raises(InvalidValueError, match=field):
        make()


def test_delayed_verification_needs_mixed_phases() -> None:
    with pytest.raises(UnsupportedError, match="lockstep"):
        SystemOptions(schedule="lockstep")


# -- lengths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["lognormal", "normal"])
def test_lengths_have_the_datasets_mean_and_deviation(shape: str) -> None:
    load = make_load(LoadOptions(requests=200_000, length_distribution=shape))
    assert load.outputs.mean() == pytest.approx(13185, rel=0.01)
    assert load.outputs.std() == pytest.approx(7626, rel=0.02)
    assert load.outputs.min() >= 1
    assert load.outputs.max() <= 32768
    assert (load.prompts.min(), load.prompts.max()) == (124, 148)


def test_a_load_follows_its_seed_and_rate() -> None:
    a, b, c = (make_load(LoadOptions(requests=4000, request_rate=2.0, seed=seed)) for seed in (1, 1, 2))
    assert (a.outputs == b.outputs).all()
    assert (a.arrivals == b.arrivals).all()
    assert (a.outputs != c.outputs).any()
    assert a.arrivals[-1] == pytest.approx(2000, rel=0.1)
    assert (np.diff(a.arrivals) >= 0).all()
    assert make_load(LoadOptions(requests=3, mean_output_len=50.0, std_output_len=0.0)).outputs.tolist() == [50] * 3


def test_lengths_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('900\n[10, 20]\n\n{"output_len": 5, "input_len": 7}\n')
    load = make_load(LoadOptions(lengths_file=str(path)))
    assert load.outputs.tolist() == [900, 20, 5]
    assert load.prompts.tolist()[1:] == [10, 7]
    path.write_text('{"output_len": 5, "arrival": 3.5}\n{"output_len": 6, "arrival": 1}\n')
    assert make_load(LoadOptions(lengths_file=str(path))).outputs.tolist() == [6, 5]
    with pytest.raises(InvalidValueError, match="request_rate"):
        make_load(LoadOptions(lengths_file=str(path), request_rate=1.0))


@pytest.mark.parametrize("line", ["x", "0", "1.5", "true", "[1, 2, 3]", '{"input_len": 5}', '{"output_len": 5, "len": 1}',
                                  '{"output_len": 5, "arrival": -1}', '5\n{"output_len": 5, "arrival": 1}', ""])
def test_a_wrong_lengths_file_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(line)
    with pytest.raises(InvalidValueError, match="lengths_file"):
        make_load(LoadOptions(lengths_file=str(path)))


def test_impossible_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="max_output_len"):
        make_load(LoadOptions(max_output_len=5000))
    with pytest.raises(InvalidValueError, match="lengths_file"):
        make_load(LoadOptions(lengths_file=str(tmp_path / "none")))
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(edited(colour="red")))
    with pytest.raises(UnknownFieldError, match=r"gpu\.colour"):
        Gpu.load(str(path))
