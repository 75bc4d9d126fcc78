"""`bench serve` against a real server and against servers that misbehave; `bench latency`; their figures against hand-made ones."""

from __future__ import annotations

import json
import socket
import statistics
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from serving import Running, serving
from sparsespec.bench.options import ServeOptions
from sparsespec.bench.serving.client import Answer
from sparsespec.bench.serving.prompts import make_prompts
from sparsespec.bench.serving.report import Speculation, block, error_summary, figures, speculation
from sparsespec.bench.serving.run import gaps, run
from sparsespec.cli.main import main
from sparsespec.config import ServerConfig
from sparsespec.core.errors import InvalidValueError, SparseSpecError, StateError


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(config=ServerConfig(api_key=["sesame"])) as running:
        yield running


def port(server: Running) -> int:
    return int(server.url.rpartition(":")[2])


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_figures_are_the_servers_own(backend: str, server: Running) -> None:
    """Every answer arrives whole, and the counters of drafts are those that the server's statistics gained."""
    before = server.get("/stats", headers={"Authorization": "Bearer sesame"}).json()
    result = run(ServeOptions(backend=backend, port=port(server), api_key="sesame", dataset_name="reasoning", num_prompts=9,
                              output_len=20, max_concurrency=4, ignore_eos=True, percentile_metrics="ttft,tpot,itl,e2el",
                              metric_percentiles="50,99", save_detailed=True))
    after = server.get("/stats", headers={"Authorization": "Bearer sesame"}).json()
    assert (result["completed"], result["failed"], result["num_prompts"]) == (9, 0, 9)
    assert result["total_output_tokens"] == 9 * 20
    assert 1 <= result["max_concurrent_requests"] <= 4
    assert result["output_throughput"] == pytest.approx(180 / result["duration"])
    assert result["mean_e2el_ms"] >= result["mean_ttft_ms"] > 0
    assert result["p50_ttft_ms"] == pytest.approx(result["median_ttft_ms"])
    assert all(len(t) > 0 for t in result["generated_texts"])
    # one request more than those counted warmed up
    assert after["num_emitted_tokens"] - before["num_emitted_tokens"] == 10 * 20
    assert 0 < result["spec_decode_num_drafts"] < after["num_drafts"] - before["num_drafts"]
    assert result["spec_decode_acceptance_length"] == 1 + result["spec_decode_accepted_tokens"] / result["spec_decode_num_drafts"]
    assert sum(result["spec_decode_per_position_acceptance_rates"]) == pytest.approx(result["spec_decode_acceptance_length"] - 1)


def test_the_command(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["bench", "serve", "--port", str(port(server)), "--api-key", "sesame", "--num-prompts", "3", "--random-input-len", "12",
             "--random-output-len", "5", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json",
             "--extra-body", '{"top_k": 3}']
    assert main(flags) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert {"Successful requests:                     3", "Total input tokens:                      36",
            "Total generated tokens:                  15"} <= set(lines)
    for label in ("Mean TTFT (ms):", "P99 TPOT (ms):", "Median ITL (ms):", "Benchmark duration (s):"):
        assert label in shown
    saved = json.loads((tmp_path / "r.json").read_text())
    assert (saved["completed"], saved["request_rate"], saved["model_id"]) == (3, "inf", saved["tokenizer_id"])
    assert main([*flags[:13], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["completed"] == 3


def test_a_key_or_server_that_is_missing(server: Running) -> None:
    with pytest.raises(InvalidValueError, match="--api-key"):
        run(ServeOptions(port=port(server), num_prompts=1))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        with pytest.raises(InvalidValueError, match="no server answers"):
            run(ServeOptions(port=s.getsockname()[1], num_prompts=1))


def test_a_request_that_the_server_refuses(server: Running) -> None:
    with pytest.raises(StateError, match=r"max_tokens|context|length"):
        run(ServeOptions(port=port(server), api_key="sesame", num_prompts=2, random_input_len=4000))


class Misbehaving(BaseHTTPRequestHandler):
    """Answers every second request with 500, every third stream without an end."""

    count = 0

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        self.send_response(200 if found else 404)
        self.end_headers()
        if found:
            self.wfile.write(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        number = Misbehaving.count
        Misbehaving.count += 1
        self.send_response(500 if number % 3 == 1 else 200)
        self.end_headers()
        if number % 3 == 1:
            self.wfile.write(b"no")
            return
        self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n'
                         b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}\n\n')
        if number % 3 == 0:
            self.wfile.write(b"data: [DONE]\n\n")


def test_failures_are_counted_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    Misbehaving.count = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Misbehaving) as bad:
        threading.Thread(target=bad.serve_forever, daemon=True).start()
        result = run(ServeOptions(port=bad.server_address[1], num_prompts=8, max_concurrency=1))
        bad.shutdown()
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (2, 6, 2)
    said = capsys.readouterr().err
    assert "3 x 500: no" in said
    assert "3 x the stream ended before [DONE]" in said


def test_arrivals() -> None:
    assert gaps(ServeOptions(num_prompts=3)) == [0.0] * 3
    poisson = gaps(ServeOptions(num_prompts=4000, request_rate=10.0))
    assert statistics.fmean(poisson) == pytest.approx(0.1, rel=0.1)
    assert statistics.pstdev(poisson) == pytest.approx(0.1, rel=0.1)
    even = gaps(ServeOptions(num_prompts=4000, request_rate=10.0, burstiness=100.0))
    assert statistics.pstdev(even) == pytest.approx(0.01, rel=0.1)


def test_the_summary_of_known_answers() -> None:
    answers = [Answer(0.0, 1.0, [0.5, 0.5], 2.0, 10, 5, "x"), Answer(0.5, 2.0, [1.0], 3.0, 20, 2, "y"),
               Answer(5.0, error="400: bad"), Answer(6.0, error="400: bad")]
    found = figures(answers, 4.0, ["ttft", "tpot", "itl", "e2el"], [50.0])
    assert (found["completed"], found["failed"], found["total_input_tokens"], found["total_output_tokens"]) == (2, 2, 30, 7)
    assert (found["mean_ttft_ms"], found["mean_tpot_ms"], found["mean_e2el_ms"]) == (1500, (250 + 1000) / 2, 2500)
    assert found["mean_itl_ms"] == pytest.approx(2000 / 3)
    assert (found["std_ttft_ms"], found["max_concurrent_requests"], found["request_throughput"]) == (500, 2, 0.5)
    assert error_summary(answers) == ["2 x 400: bad"]
    text = block({**found, "max_concurrency": 2, "request_rate": 4.0, **Speculation(10, 80, 60, [0.9]).figures()}, ["ttft"], [50.0])
    assert "Acceptance length:                       7.00" in text
    assert "P50 TTFT (ms):                           1500.00" in text


def test_counters_of_vllm_are_read_too() -> None:
    def page(drafts: int, accepted: tuple[int, int]) -> str:
        head = "# TYPE vllm:spec_decode_num_{0} counter\n"
        totals = {"drafts": drafts, "draft_tokens": drafts * 2, "accepted_tokens": sum(accepted)}
        out = "".join(head.format(name) + f'vllm:spec_decode_num_{name}_total{{engine="0"}} {n}\n' for name, n in totals.items())
        return out + head.format("accepted_tokens_per_pos") + "".join(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {n}\n' for i, n in enumerate(accepted))

    assert speculation(page(10, (5, 1)), page(30, (20, 11))) == Speculation(20, 40, 25, [0.75, 0.5])
    assert speculation("", "") is None
    assert speculation(page(10, (5, 1)), page(10, (5, 1))) is None


def test_prompts_from_files(tmp_path: Path) -> None:
    custom = tmp_path / "a.jsonl"
    custom.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    found = make_prompts(ServeOptions(dataset_name="custom", dataset_path=str(custom), num_prompts=5))
    assert [p.content for p in found[:2]] == ["one", "two"]
    assert {p.content for p in found} == {"one", "two"}
    with pytest.raises(InvalidValueError, match="has 2 prompts"):
        make_prompts(ServeOptions(dataset_name="custom", dataset_path=str(custom), num_prompts=5, disable_oversample=True))
    shared = tmp_path / "b.json"
    shared.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hello"}, {"value": "x"}]}]))
    assert make_prompts(ServeOptions(dataset_name="sharegpt", dataset_path=str(shared), num_prompts=1))[0].content == "hello"
    shared.write_text('[{"text": 1}]')
    with pytest.raises(InvalidValueError, match="holds no prompt"):
        make_prompts(ServeOptions(dataset_name="custom", dataset_path=str(shared), num_prompts=1))


@pytest.mark.parametrize("values", [
    {"num_prompts": 0}, {"request_rate": 0.0}, {"percentile_metrics": "tfft"}, {"metric_percentiles": "x"},
    {"metric_percentiles": "101"},
    {"backend": "grpc"}, {"extra_body": "[1]"}, {"extra_body": "{"}, {"max_concurrency": 0}, {"random_range_ratio": 2.0}])
def test_wrong_settings(values: dict[str, Any]) -> None:
    with pytest.raises(SparseSpecError, match=next(iter(values))):
        ServeOptions(**values)


def test_latency(capsys: pytest.CaptureFixture[str]) -> None:
    from serving import tiny_directory

    flags = ["bench", "latency", "--model", str(tiny_directory()), "--device", "cpu", "--batch-size", "2", "--input-len", "8",
             "--output-len", "6", "--num-iters", "3", "--num-iters-warmup", "1", "--max-model-len", "64",
             "--kv-cache-tokens", "512"]
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["latencies"]) == 3
    assert found["avg_latency"] == pytest.approx(statistics.fmean(found["latencies"]))
    assert found["percentiles"]["50"] == pytest.approx(statistics.median(found["latencies"]))
    assert main(flags) == 0
    assert "Avg latency: " in capsys.readouterr().out
