"""/v1/completions and the small endpoints, through the official client and on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving import Running, byte_tokenizer, events, offline, serving, tiny_loaded
from sparsespec import SamplingParams
from sparsespec.config import ServerConfig
from sparsespec.core.errors import InvalidValueError
from sparsespec.server.defaults import sampling_defaults

PROMPTS = ["The three states of water are", "def f(x):", "é 你好"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(config=ServerConfig(served_model_name=["tiny", "also-tiny"])) as running:
        yield running


def test_every_field_of_an_answer(server: Running) -> None:
    r = server.client().completions.create(model="also-tiny", prompt=PROMPTS[0], seed=7)
    assert (r.object, r.model, r.id[:5]) == ("text_completion", "also-tiny", "cmpl-")
    expected = offline().generate(PROMPTS[0], SamplingParams(seed=7), use_tqdm=False)[0]
    choice, = r.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, expected.outputs[0].text, "length", None)
    assert r.usage is not None
    assert (r.usage.prompt_tokens, r.usage.completion_tokens) == (len(PROMPTS[0]), 16)  # a byte is a token; 16 is OpenAI's default


@pytest.mark.parametrize("form", ["text", "ids", "texts", "lists of ids"])
def test_forms_of_prompts(server: Running, form: str) -> None:
    ids = [list(byte_tokenizer()(p)["input_ids"]) for p in PROMPTS]
    prompt: Any = {"text": PROMPTS[0], "ids": ids[0], "texts": PROMPTS, "lists of ids": ids}[form]
    count = 3 if form in ("texts", "lists of ids") else 1
    r = server.client().completions.create(model="tiny", prompt=prompt, n=2, seed=5, max_tokens=12)
    params = SamplingParams(n=2, seed=5, max_tokens=12)
    expected = offline().generate([{"prompt_token_ids": i} for i in ids[:count]], params, use_tqdm=False)
    assert [c.index for c in r.choices] == list(range(2 * count))
    assert [c.text for c in r.choices] == [c.text for o in expected for c in o.outputs]
    chunks = list(server.client().completions.create(model="tiny", prompt=prompt, n=2, seed=5, max_tokens=12, stream=True))
    for index, choice in enumerate(r.choices):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
    assert r.usage is not None
    assert r.usage.prompt_tokens == sum(map(len, ids[:count]))


def test_logprobs_streamed_and_not(server: Running) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[2], "seed": 4, "max_tokens": 30, "logprobs": 3}
    whole = server.client().completions.create(**request).choices[0].logprobs
    assert whole is not None
    chunks = [c.logprobs for chunk in server.client().completions.create(**request, stream=True) for c in chunk.choices]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for lp in chunks if lp is not None for x in getattr(lp, name)] == getattr(whole, name)
    assert len(whole.tokens or []) == 30
    expected = offline().generate(PROMPTS[2], SamplingParams(seed=4, max_tokens=30, logprobs=3), use_tqdm=False)[0].outputs[0]
    assert expected.logprobs is not None
    assert whole.token_logprobs == [row[i].logprob for i, row in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert whole.text_offset == [sum(map(len, (whole.tokens or [])[:i])) for i in range(30)]


def test_echo(server: Running) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "seed": 4, "max_tokens": 6}
    plain = server.client().completions.create(**request).choices[0].text
    assert server.client().completions.create(**request, echo=True).choices[0].text == PROMPTS[0] + plain
    ids = list(byte_tokenizer()(PROMPTS[2])["input_ids"])
    assert server.client().completions.create(**{**request, "prompt": ids}, echo=True).choices[0].text.startswith(PROMPTS[2])
    chunks = list(server.client().completions.create(**request, echo=True, stream=True))
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == PROMPTS[0] + plain
    scored = server.client().completions.create(**request, echo=True, logprobs=1).choices[0].logprobs
    assert scored is not None
    assert len(scored.tokens or []) == len(PROMPTS[0]) + 6
    assert (scored.token_logprobs or [])[0] is None
    assert all(lp <= 0 for lp in (scored.token_logprobs or [])[1:])


def test_tokens_as_ids(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 3, "seed": 1, "logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    r = server.post("/v1/completions", body).json()["choices"][0]
    assert r["logprobs"]["tokens"] == [f"token_id:{i}" for i in r["token_ids"]]
    assert r["prompt_token_ids"] == byte_tokenizer()("a")["input_ids"]


def test_models(server: Running) -> None:
    client = server.client()
    assert [m.id for m in client.models.list()] == ["tiny", "also-tiny"]
    assert client.models.retrieve("also-tiny").id == "also-tiny"
    model = server.get("/v1/models/tiny").json()
    assert (model["owned_by"], model["max_model_len"], model["root"]) == ("sparsespec", 512, tiny_loaded().name)
    assert server.get("/v1/models/other").status_code == 404


def test_tokenize_and_back(server: Running) -> None:
    r = server.post("/tokenize", {"prompt": "é<think>x", "return_token_strs": True}).json()
    assert (r["count"], r["max_model_len"], r["token_strs"]) == (4, 512, ["Ã", "©", "<think>", "x"])
    assert server.post("/detokenize", {"tokens": r["tokens"]}).json() == {"prompt": "é<think>x"}
    assert server.post("/detokenize", {"tokens": [10**30]}).status_code == 400
    assert server.post("/tokenize", {}).status_code == 400


def test_health_version_stats(server: Running) -> None:
    assert server.get("/health").json() == {"status": "ok", "detail": None}
    assert server.get("/version").json()["version"]
    stats = server.wait_idle()
    assert stats["num_emitted_tokens"] > 0
    assert sum(stats["rows_by_phase"].values()) == stats["gemm_rows"]
    assert stats["rows_by_phase"]["draft"] == stats["num_draft_tokens"]


def test_metrics(server: Running) -> None:
    before = server.get("/metrics").text
    server.post("/v1/completions", {"prompt": "abc", "max_tokens": 12, "seed": 1})
    list(events(server.post("/v1/completions", {"prompt": "abcd", "max_tokens": 12, "seed": 1, "stream": True})))
    server.post("/v1/completions", {"prompt": "abc", "max_tokens": 0})
    after = server.get("/metrics").text

    def grown(name: str, labels: str = "") -> float:
        line = f'sparsespec:{name}{{engine="0",'
        values = [sum(float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line) and labels in row)
                  for text in (before, after)]
        return values[1] - values[0]

    assert (grown("prompt_tokens_total"), grown("generation_tokens_total")) == (7, 24)
    assert (grown("request_success_total", 'finished_reason="length"'), grown("http_errors_total", 'status="400"')) == (2, 1)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "request_prompt_tokens", "request_generation_tokens", "request_time_per_output_token_seconds", "request_params_n"):
        assert grown(f"{name}_count") == 2
    assert grown("inter_token_latency_seconds_count") > 0
    accepted = [grown("spec_decode_num_accepted_tokens_per_pos_total", f'position="{i}"') for i in range(4)]
    assert sum(accepted) == grown("spec_decode_num_accepted_tokens_total") > 0
    assert accepted == sorted(accepted, reverse=True)
    assert grown("iteration_rows_total", 'phase="draft"') == grown("spec_decode_num_draft_tokens_total") > 0


def test_cached_tokens_are_counted(server: Running) -> None:
    body = {"prompt": "q" * 100, "max_tokens": 2}
    cached = [server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert cached[0] == 0
    assert 0 < cached[1] < 100
    hits = next(line for line in server.get("/metrics").text.splitlines() if line.startswith("sparsespec:prefix_cache_hits_total"))
    assert float(hits.rsplit(" ", 1)[1]) >= cached[1]


def test_no_tokenizer() -> None:
    with serving(replace(tiny_loaded(), tokenizer=None)) as server:
        r = server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "return_token_ids": True,
                                            "logprobs": 1}).json()["choices"][0]
        assert (r["text"], len(r["token_ids"])) == ("", 5)
        assert r["logprobs"]["tokens"] == [f"token_id:{i}" for i in r["token_ids"]]
        for path, body in (("/v1/completions", {"prompt": "abc"}), ("/v1/chat/completions", {"messages": [
                {"role": "user", "content": "x"}]}), ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            assert server.post(path, body).status_code == 400


def test_sampling_defaults_of_the_model(tmp_path: Path) -> None:
    """Those of generation_config.json count where a request says nothing."""
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "top_k": 3, "do_sample": false, "eos_token_id": 1}')
    assert sampling_defaults(str(tmp_path), "any") == sampling_defaults("auto", str(tmp_path)) == {"temperature": 0.0, "top_k": 3}
    assert sampling_defaults("none", str(tmp_path)) == sampling_defaults("auto", "no such model") == {}
    greedy = offline().generate("abc", SamplingParams(temperature=0), use_tqdm=False)[0].outputs[0].text
    with serving(config=ServerConfig(generation_config=str(tmp_path))) as server:
        assert server.post("/v1/completions", {"prompt": "abc"}).json()["choices"][0]["text"] == greedy
        assert server.post("/v1/completions", {"prompt": "abc", "temperature": 9, "top_k": 0, "seed": 1}).json()[
            "choices"][0]["text"] != greedy
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    for source in (str(tmp_path), str(tmp_path / "nothing")):
        with pytest.raises(InvalidValueError, match="generation_config"):
            sampling_defaults(source, "any")
