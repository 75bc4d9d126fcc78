"""Benchmark datasets: each public format from each kind of file, shipped texts, length traces, and what is no dataset."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsespec import LLM
from sparsespec.bench.datasets import SHIPPED, TRACES, Question, build, load
from sparsespec.bench.datasets.load import read_records
from sparsespec.cli.main import main
from sparsespec.core.errors import InvalidValueError, SparseSpecError, UnsupportedError
from sparsespec.loader.loaded import LoadedModel

RECORDS: dict[str, list[dict[str, Any]]] = {
    "aime": [{"ID": "2024-I-1", "Problem": "Find x if x + 1 = 3.", "Solution": "Subtract 1.", "Answer": 2},
             {"ID": "2024-I-2", "Problem": "Find the product of 6 and 7.", "Solution": "", "Answer": 42}],
    "olympiadbench": [
        {"id": 7, "question": "What is 2 + 2?", "solution": ["Add."], "final_answer": ["4"], "context": "Work with integers.",
         "image_1": None, "modality": "Text-only", "is_multiple_answer": False, "unit": "cm", "answer_type": "Numerical"},
        {"id": 8, "question": "What is shown?", "solution": [], "final_answer": ["a cat"], "context": None, "image_1": "cat.png",
         "modality": "Multimodal", "is_multiple_answer": False, "unit": None, "answer_type": "Expression"},
        {"id": 9, "question": "Which x solve x² = 4?", "solution": [], "final_answer": ["2", "-2"], "context": None,
         "image_1": None, "modality": "Text-only", "is_multiple_answer": True, "unit": None, "answer_type": "Numerical"}],
    "livecodebench": [
        {"question_title": "Sum", "question_content": "Add two numbers.", "platform": "atcoder", "question_id": "abc_1",
         "starter_code": "", "difficulty": "easy", "public_test_cases": "[]", "private_test_cases": "", "metadata": "{}"},
        {"question_title": "Twice", "question_content": "Double it.", "platform": "leetcode", "question_id": "2",
         "starter_code": "class Solution:\n    def twice(self, n): ", "difficulty": "easy", "public_test_cases": "[]",
         "private_test_cases": "", "metadata": "{}"}],
    "prompts": [{"prompt": "Say hello."}],
}


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, records)) + "\n\n", encoding="utf-8")
    else:
        path.write_text(json.dumps(records), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
@pytest.mark.parametrize("form", RECORDS)
def test_each_format_from_each_file(form: str, suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"data{suffix}", RECORDS[form])
    named, guessed = load(f"{form}={path}"), load(str(path))
    assert named.name == form
    assert (guessed.name, guessed.kind) == ("data", "chat")
    assert named.entries == guessed.entries
    assert len(named.entries) == len(RECORDS[form]) - (form == "olympiadbench")  # the one with a picture is passed over


def test_what_is_asked(tmp_path: Path) -> None:
    aime = load(str(write(tmp_path / "a.json", RECORDS["aime"]))).entries
    assert [(q.name, q.answer) for q in aime] == [("2024-I-1", "2"), ("2024-I-2", "42")]
    assert aime[0].text.startswith("Find x if x + 1 = 3.")
    assert "\\boxed{}" in aime[0].text
    first, several = load(str(write(tmp_path / "o.json", RECORDS["olympiadbench"]))).entries
    assert (first.name, first.answer, several.name, several.answer) == ("7", "4", "9", "2, -2")
    assert first.text.startswith("Work with integers.\n\nWhat is 2 + 2?")
    assert "in cm" in first.text
    assert "more than one answer" in several.text
    assert "more than one answer" not in first.text
    stdin, starter = load(str(write(tmp_path / "l.json", RECORDS["livecodebench"]))).entries
    assert (stdin.name, stdin.answer) == ("abc_1", None)
    assert "standard input" in stdin.text
    assert "class Solution" in starter.text
    assert "standard input" not in starter.text


@pytest.mark.parametrize("record", [
    {"problem": "p", "answer": "1", "id": "0"}, {"question": "p", "answer": "1"}, {"Question": "p", "Answer": 1, "ID": "0"},
    {"id": "AIME24I-1", "problem": 1, "question": "p", "answer": "1"}])
def test_spellings_of_aime(record: dict[str, Any], tmp_path: Path) -> None:
    question = load(f"aime={write(tmp_path / 'x.jsonl', [record])}").entries[0]
    assert question.answer == "1"
    assert question.text.startswith("p\n")


def test_a_list_inside_an_object(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"version": 1, "data": RECORDS["aime"]}))
    assert len(load(str(path)).entries) == 2


def test_unknown_fields_are_named_with_those_wanted(tmp_path: Path) -> None:
    path = write(tmp_path / "odd.json", [{"foo": 1, "bar": 2}])
    with pytest.raises(InvalidValueError, match=r"bar, foo") as e:
        load(str(path))
    text = str(e.value)
    assert str(path) in text
    assert all(field in text for field in ("question_content", "final_answer", "Problem", "prompt"))
    with pytest.raises(InvalidValueError, match=r"fit no known format.*olympiadbench: question and final_answer/modality"):
        load(f"olympiadbench={write(tmp_path / 'a.json', RECORDS['aime'])}")


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.json", "{", "not readable as json"), ("a.jsonl", '{"prompt": "x"}\n{', "not readable as jsonl"),
    ("a.json", "[1]", "not a list of records"), ("a.json", "{}", "not a list of records"), ("a.json", "[]", "holds no records"),
    ("a.parquet", "no parquet", "not readable as parquet"), ("a.json", '[{"prompt": ""}]', "prompt is empty"),
    ("a.json", '[{"prompt": "a"}, {"text": "b"}]', r"a.json\[1\]"),
    ("a.json", '[{"question": "q", "final_answer": "1", "modality": "Multimodal"}]', "text-only")])
def test_broken_files(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidValueError, match=message):
        load(str(tmp_path / name))


@pytest.mark.parametrize(("spec", "message"), [
    ("vibes", "neither a shipped set nor a file"), ("aime=", "no source"), ("text=", "no source"), ("aime=/no/file", "nor a file"),
    ("trace=vibes", "unknown trace")])
def test_what_is_no_dataset(spec: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        load(spec)


def test_by_name_through_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*args: str) -> dict[str, list[dict[str, Any]]]:
        asked.append(args)
        if args[0] == "some/missing":
            raise ConnectionError("no network")
        return {"train": RECORDS["prompts"], "test": RECORDS["aime"]} if args[0] == "some/aime" else {"train": RECORDS["aime"]}

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert len(load("aime=hub:some/aime").entries) == 2
    assert len(load("aime=hub:some/other:config").entries) == 2
    assert asked == [("some/aime",), ("some/other", "config")]
    with pytest.raises(InvalidValueError, match="no network"):
        load("aime=hub:some/missing")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(UnsupportedError, match=r"sparsespec\[datasets\]"):
        load("aime=hub:some/aime")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", RECORDS["aime"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match=r"sparsespec\[datasets\]"):
        read_records(path)


def test_traces_have_the_published_moments() -> None:
    assert not TRACES["aime"].estimated
    assert TRACES["olympiadbench"].estimated
    lengths = np.array(TRACES["aime"].lengths(50_000, seed=1))
    assert lengths[:, 0].min() == 124
    assert lengths[:, 0].max() == 148
    assert lengths[:, 1].mean() == pytest.approx(13185, rel=0.02)
    assert lengths[:, 1].std() == pytest.approx(7626, rel=0.02)
    small = TRACES["aime"].lengths(100, seed=1, scale=0.01)
    assert small == TRACES["aime"].lengths(100, seed=1, scale=0.01)
    assert all(i in (1, 2) and o >= 1 for i, o in small)


def test_shipped_sets_are_there() -> None:
    assert set(SHIPPED) == {"reasoning", "code", "longdoc", "random"}
    for name, least in (("reasoning", 50), ("code", 1_000_000), ("longdoc", 300_000)):
        dataset = load(name)
        assert len(dataset.entries) == 16
        assert all(len(q.text) > least for q in dataset.entries)
        assert len({q.name for q in dataset.entries}) == 16


@pytest.fixture(scope="module")
def smol_llm(smol: LoadedModel) -> LLM:
    return LLM(smol, speculative_config={"method": "none"}, max_num_seqs=1, kv_cache_tokens=256)


def ids(llm: LLM, item: Any) -> list[int]:
    return llm.engine.admission.tokenize(item.prompt)[1]


def test_texts_get_the_length_that_is_asked_for(smol_llm: LLM, tmp_path: Path) -> None:
    code = build(load("code"), smol_llm, 2, 700)
    assert [len(ids(smol_llm, item)) for item in code] == [700, 700]
    assert ids(smol_llm, code[0])[:300] == ids(smol_llm, build(load("code"), smol_llm, 1, 300)[0])
    for length in (150, 700):
        document = build(load("longdoc"), smol_llm, 1, length)[0]
        assert 0.97 * length - 2 <= len(ids(smol_llm, document)) <= length
        assert "<|im_start|>" in document.prompt["prompt"]
    path = tmp_path / "notes.txt"
    path.write_text("one two three " * 100)
    assert len(ids(smol_llm, build(load(str(path)), smol_llm, 1, 200)[0])) == 200
    for bad in (5000, 30):
        with pytest.raises(InvalidValueError, match="tokens"):
            build(load(str(path)) if bad > 100 else load("longdoc"), smol_llm, 1, bad)


def test_questions_go_through_the_template(smol_llm: LLM) -> None:
    item = build(load("reasoning"), smol_llm, 1)[0]
    assert item.question in item.prompt["prompt"]
    assert item.prompt["prompt"] != item.question
    with pytest.raises(InvalidValueError, match="16 problems"):
        build(load("reasoning"), smol_llm, 17)


def test_random_and_traces_need_no_tokenizer(tiny_models: dict[str, LoadedModel]) -> None:
    llm = LLM(tiny_models["qwen3"], speculative_config={"method": "none"}, max_num_seqs=1, kv_cache_tokens=256)
    assert [len(ids(llm, item)) for item in build(load("random"), llm, 3, 9)] == [9, 9, 9]
    items = build(load("trace=aime"), llm, 3, seed=2, scale=0.01)
    assert [(len(ids(llm, item)), item.max_tokens) for item in items] == TRACES["aime"].lengths(3, 2, 0.01)
    with pytest.raises(SparseSpecError, match="tokenizer"):
        build(load("code"), llm, 1, 10)
    assert Question("a", "b").answer is None


def test_throughput_of_a_trace(tiny_models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch, one_thread: None,
                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sparsespec.engine.engine.load_model", lambda *_, **__: tiny_models["qwen3"])
    assert main(["bench", "throughput", "--dataset", "trace=aime", "--length-scale", "0.002", "--num-prompts", "3", "--compare",
                 "none", "--max-model-len", "128", "--no-speculative-config.adaptive", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(a["token_ids"]) for a in found["answers"]] == [out for _, out in TRACES["aime"].lengths(3, 0, 0.002)]
    assert found["outputs_identical"] is True
