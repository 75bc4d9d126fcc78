"""The command line: flags follow the configuration, errors are one line, and nothing heavy loads before it has to."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparsespec.bench import compare
from sparsespec.cli import flags, generate, prompts
from sparsespec.cli.main import build_parser, main
from sparsespec.config import EngineConfig, SpeculativeConfig
from sparsespec.core.errors import InvalidValueError, SparseSpecError, UnknownFieldError
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.loader.loaded import LoadedModel

COMMANDS = (["generate"], ["chat"], ["bench", "throughput"], ["bench", "acceptance"], ["bench", "sweep"])


def parse(*argv: str) -> Any:
    return build_parser().parse_args(argv)


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_nothing_heavy_is_imported_before_a_command_runs() -> None:
    loaded = python("import sys, sparsespec, sparsespec.cli.main as m\nm.build_parser()\nsparsespec.SamplingParams\n"
                    "print([n for n in ('torch', 'transformers', 'numpy', 'rich', 'tqdm') if n in sys.modules])")
    assert loaded == "[]"


def test_lazy_names() -> None:
    import sparsespec

    assert sparsespec.__version__ == "0.1.0"
    assert sparsespec.SamplingParams is SamplingParams
    assert set(sparsespec.__all__) <= set(dir(sparsespec))
    for name in sparsespec.__all__:
        assert getattr(sparsespec, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = sparsespec.nonsense


def test_python_m_and_version() -> None:
    out = subprocess.run([sys.executable, "-m", "sparsespec", "--version"], capture_output=True, text=True, check=True).stdout
    assert out == "sparsespec 0.1.0\n"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_engine_setting_has_a_flag(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*command, "--help")
    text = capsys.readouterr().out
    for cls in flags.PARTS.values():
        for f in dataclasses.fields(cls):
            assert flags.flag(f.name) in text
            assert f.metadata["help"].split()[0] in text
    for f in dataclasses.fields(SpeculativeConfig):
        assert flags.flag(f"speculative_config.{f.name}") in text


def test_every_sampling_field_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("generate", "--help")
    text = capsys.readouterr().out
    for f in dataclasses.fields(SamplingParams):
        assert not f.init or flags.flag(f.name) in text
    named = {f.name for f in dataclasses.fields(SamplingParams) if f.init}
    assert named - {"seed", "speculative_config"} == set(flags.SAMPLING_HELP)


def test_only_given_flags_reach_the_engine() -> None:
    assert flags.engine_kwargs(parse("generate", "hi")) == {}
    args = parse("generate", "hi", "--model", "m", "--max-model-len", "512", "--no-enable-prefix-caching", "--seed", "3",
                 "--kv-cache-tokens", "none", "--gpu-memory-utilization", "0.5")
    kwargs = flags.engine_kwargs(args)
    assert kwargs == {"model": "m", "max_model_len": 512, "enable_prefix_caching": False, "seed": 3, "kv_cache_tokens": None,
                      "gpu_memory_utilization": 0.5}
    config = EngineConfig.from_kwargs(**kwargs)
    assert (config.load.max_model_len, config.cache.enable_prefix_caching, config.load.seed) == (512, False, 3)


def test_speculative_config_as_json_and_dotted() -> None:
    args = parse("generate", "hi", "--speculative-config", '{"method": "none", "num_speculative_tokens": 4}',
                 "--speculative-config.method", "pillar", "--no-speculative-config.adaptive",
                 "--speculative-config.sparse-attn-ratio", "0.2")
    spec = flags.engine_kwargs(args)["speculative_config"]
    assert spec == {"method": "pillar", "num_speculative_tokens": 4, "adaptive": False, "sparse_attn_ratio": 0.2}
    with pytest.raises(UnknownFieldError, match="bogus"):
        EngineConfig.from_kwargs(**flags.engine_kwargs(parse("generate", "--speculative-config", '{"bogus": 1}')))
    with pytest.raises(InvalidValueError, match="speculative-config"):
        flags.engine_kwargs(parse("generate", "--speculative-config", "[1]"))


def test_sampling_flags() -> None:
    args = parse("generate", "--temperature", "0", "--top-p", "0.9", "--top-k", "5", "--stop", "a", "--stop", "b",
                 "--stop-token-ids", "1", "2", "--logit-bias", '{"7": -100}', "--ignore-eos", "--max-tokens", "none")
    assert flags.sampling_params(args, max_tokens=generate.MAX_TOKENS) == SamplingParams(
        temperature=0.0, top_p=0.9, top_k=5, stop=["a", "b"], stop_token_ids=[1, 2], logit_bias={7: -100.0}, ignore_eos=True,
        max_tokens=None)
    assert flags.sampling_params(parse("generate"), max_tokens=99) == SamplingParams(max_tokens=99)


@pytest.mark.parametrize("argv", [["--max-tokens", "x"], ["--dtype", "int3"], ["--logit-bias", "{"], ["--max-tok", "3"],
                                  ["--chat", "--raw"], ["--seed", "none"]])
def test_malformed_flags_end_with_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        parse("generate", "hi", *argv)
    assert e.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["generate", "hi", "--top-p", "2"], ["generate", "hi", "--temperature", "-1"],
                                  ["generate", "--input-file", "/no/such/file"], ["chat", "--n", "2"],
                                  ["bench", "throughput", "--num-prompts", "0"],
                                  ["bench", "throughput", "--compare", "vibes"]])
def test_wrong_values_are_one_line_on_stderr(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_prompts_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('"one"\n{"prompt": "two"}\n\n{"prompt_token_ids": [1, 2]}\n'
                     '{"messages": [{"role": "user", "content": "x"}]}\n')
    assert prompts.read_prompts(["zero"], str(lines)) == [
        "zero", "one", "two", {"prompt_token_ids": [1, 2]}, {"messages": [{"role": "user", "content": "x"}]}]
    plain = tmp_path / "b.txt"
    plain.write_text("one\n\ntwo\n")
    assert prompts.read_prompts([], str(plain)) == ["one", "two"]
    monkeypatch.setattr("sys.stdin", io.StringIO("all of\nit\n"))
    assert prompts.read_prompts([], None) == ["all of\nit"]
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    assert prompts.read_prompts([], "-") == ["a", "b"]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(InvalidValueError, match="no prompt"):
        prompts.read_prompts([], None)


@pytest.mark.parametrize("line", ["{", "[1]", "3", "{}", '{"prompt": "a", "messages": []}', '{"text": "a"}'])
def test_a_wrong_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('"fine"\n' + line + "\n")
    with pytest.raises(InvalidValueError, match=r"bad\.jsonl:2"):
        prompts.read_prompts([], str(path))


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["packages"]["sparsespec"] == "0.1.0"
    assert info["cpu"]["torch_threads"] >= 1
    assert main(["env"]) == 0
    assert info["packages"]["torch"] in capsys.readouterr().out


def test_problems_are_sound() -> None:
    from sparsespec.bench.datasets import problems

    every = problems()
    assert len(every) == 16
    assert len({p["id"] for p in every}) == 16
    assert {p["category"] for p in every} == {"maths", "logic", "code"}
    assert all(p["prompt"].strip() for p in every)


def test_differences_are_found_and_judged() -> None:
    found = compare.differences([[1, 2, 3], [4, 5], [6]], [[1, 2, 3], [4, 6], [6, 7]])
    assert [(d.prompt, d.position, d.expected, d.got) for d in found] == [(1, 1, 5, 6), (2, 1, None, 7)]
    near = [compare.Difference(0, 3, 1, 2, 0.01)]
    assert compare.explained([], "torch.float32")
    assert not compare.explained(near, "torch.float32")
    assert compare.explained(near, "torch.bfloat16")
    assert not compare.explained([*near, compare.Difference(1, 3, 1, 2, 2.0)], "torch.bfloat16")
    assert not compare.explained(found, "torch.bfloat16")


# --- with the embedded model -----------------------------------------------------------------------------------------

SMALL = ["--max-tokens", "8", "--temperature", "0", "--max-model-len", "256"]


@pytest.fixture
def weights(smol: LoadedModel, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Commands run as users run them, but on weights that were loaded once."""
    monkeypatch.setattr("sparsespec.engine.engine.load_model", lambda *_, **__: smol)


@pytest.mark.usefixtures("weights")
def test_generate_streams_what_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "The sky is", "--raw", *SMALL]) == 0
    streamed = capsys.readouterr().out
    assert main(["generate", "The sky is", "--raw", "--json", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    completion = found["outputs"][0]["completions"][0]
    assert streamed == completion["text"] + "\n"
    assert len(completion["token_ids"]) == 8
    assert completion["finish_reason"] == "length"
    assert found["stats"]["num_emitted_tokens"] == 8


@pytest.mark.usefixtures("weights")
def test_generate_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.txt"
    path.write_text("What is 2 + 2?\nName a colour.\n")
    assert main(["generate", "--input-file", str(path), "--n", "2", *SMALL]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("--- ")] == [
        "--- 1.1: What is 2 + 2?", "--- 1.2: What is 2 + 2?", "--- 2.1: Name a colour.", "--- 2.2: Name a colour."]


@pytest.mark.usefixtures("weights")
def test_chat_keeps_and_forgets_its_history(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from sparsespec.llm import LLM

    seen: list[list[dict[str, str]]] = []
    original = LLM.apply_chat_template

    def record(self: LLM, messages: list[dict[str, str]], *args: Any) -> dict[str, Any]:
        seen.append([dict(m) for m in messages])
        return original(self, messages, *args)

    monkeypatch.setattr(LLM, "apply_chat_template", record)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nAnd you?\n/reset\nHello\n/quit\nnever\n"))
    assert main(["chat", "--system", "Be brief.", *SMALL]) == 0
    answers = capsys.readouterr().out
    roles = [[m["role"] for m in messages] for messages in seen]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert seen[1][2]["content"] in answers
    assert seen[2][1]["content"] == "Hello"


@pytest.mark.usefixtures("weights")
def test_bench_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "throughput", "--num-prompts", "2", "--max-tokens", "12", "--max-model-len", "256", "--compare", "none"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outputs_identical"] is True
    assert [p["name"] for p in found["passes"]] == ["plain", "pillar, always", "pillar, adaptive"]
    plain, always, _ = found["passes"]
    assert plain["rounds"] == 0
    assert plain["accepted_per_round"] is None
    assert always["rounds"] > 0
    assert 0 <= always["accepted_per_round"] <= always["drafted_per_round"] <= 8
    assert always["accepted_by_position"][0] <= 1
    assert all(p["tokens"] == plain["tokens"] and p["kv_bytes_per_token"] > 0 for p in found["passes"])
    assert main([*argv, "--show-answers"]) == 0
    out = capsys.readouterr().out
    assert "outputs identical: yes" in out
    assert found["answers"][0]["question"][:30] in out


@pytest.mark.usefixtures("weights")
def test_bench_random_without_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", "--dataset", "random", "--num-prompts", "2", "--input-len", "20", "--output-len", "6",
                 "--max-model-len", "128", "--speculative-config.method", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [p["name"] for p in found["passes"]] == ["plain"]
    assert found["passes"][0]["tokens"] == 12
    assert found["outputs_identical"] is None


@pytest.mark.usefixtures("weights")
def test_bench_reports_a_difference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A pass that gives another token is shown with its gap, and the exit code is 1."""
    from sparsespec.bench import throughput

    original = throughput._run_pass

    def broken(llm: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        result = original(llm, name, *args, **kwargs)
        if name.endswith("always"):
            ids = result.outputs[0].outputs[0].token_ids
            ids[2] = (ids[2] + 1) % 1000
        return result

    monkeypatch.setattr(throughput, "_run_pass", broken)
    assert main(["bench", "throughput", "--num-prompts", "1", "--max-tokens", "4", "--max-model-len", "256",
                 "--compare", "none"]) == 1
    out = capsys.readouterr().out
    assert "outputs identical: no" in out
    assert "1 of 1 outputs differ" in out
    assert "token 2" in out


def test_errors_of_the_engine_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--model", "/no/such/model"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("error: ")
    assert issubclass(InvalidValueError, SparseSpecError)
