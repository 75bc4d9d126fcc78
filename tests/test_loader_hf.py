"""Hugging Face directories: what transformers saves is what loads, and every fault of a directory is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsespec.config.engine import LoadConfig
from sparsespec.core.errors import InvalidValueError, ModelLoadError
from sparsespec.loader import LoadedModel, load_model

VOCAB = 96


class Causal:
    """Dense causal attention over one prompt: enough of a backend to compare logits."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def tiny(kind: str, **changes: Any) -> Any:
    """A random Hugging Face model of two layers, with biases that are not zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": False,
             "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | changes))).eval()
    for name, p in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(p, 0.5 if "norm" in name else 0, 0.3)
    return model


@torch.no_grad()
def check_logits(loaded: LoadedModel, reference: Any, tolerance: float = 2e-5) -> None:
    ids = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(1))
    model = loaded.model
    hidden, _ = model(ids, torch.arange(20), Causal(), model.rotary(64))
    want = reference(ids[None]).logits[0].float()
    torch.testing.assert_close(model.logits(hidden), want, atol=tolerance * float(want.abs().max()), rtol=0)


def load(path: Path, **settings: Any) -> LoadedModel:
    return load_model(LoadConfig(**({"model": str(path), "device": "cpu", "skip_tokenizer_init": True} | settings)))


CASES = [("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
         ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
                                        "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
         ("qwen2", {}), ("qwen3", {"head_dim": 32})]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_round_trip(tmp_path: Path, kind: str, changes: dict[str, Any], tied: bool) -> None:
    model = tiny(kind, tie_word_embeddings=tied, **changes)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert (loaded.dtype, loaded.device.type, loaded.name, loaded.tokenizer) == (torch.float32, "cpu", str(tmp_path), None)
    check_logits(loaded, model)


def test_shards(tmp_path: Path) -> None:
    model = tiny("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    check_logits(load(tmp_path), model)
    shards[1].unlink()
    refuse(tmp_path, shards[1].name, "not there")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(tmp_path: Path, dtype: str) -> None:
    """A half-precision checkpoint in float32 is exact; loaded as such it keeps its type."""
    model = tiny("llama").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    assert load(tmp_path).config.dtype == dtype
    check_logits(load(tmp_path), type(model).from_pretrained(tmp_path, dtype=torch.float32).eval())
    assert load(tmp_path, dtype=dtype).model.embedding.dtype == getattr(torch, dtype)


def test_thread_count_is_given_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tiny("llama").config.save_pretrained(tmp_path)
        load(tmp_path, load_format="dummy")
        refuse(tmp_path, "model.safetensors")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_end_tokens_are_united(tmp_path: Path) -> None:
    model = tiny("llama", eos_token_id=[2, 5])
    model.generation_config.eos_token_id = [5, 7]
    model.save_pretrained(tmp_path)
    assert load(tmp_path).eos_token_ids == (2, 5, 7)


def test_tokenizer_of_a_directory(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tiny("llama").save_pretrained(tmp_path)
    refuse(tmp_path, "there is no tokenizer", "skip_tokenizer_init", skip_tokenizer_init=False)
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "</s>": 9}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path / "tok")
    loaded = load(tmp_path, skip_tokenizer_init=False, tokenizer=str(tmp_path / "tok"))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("b a b")["input_ids"] == [2, 1, 2]
    assert loaded.eos_token_ids == (2, 9)
    (tmp_path / "tok" / "tokenizer.json").write_text("{")
    refuse(tmp_path, "tok", "not readable", skip_tokenizer_init=False, tokenizer=str(tmp_path / "tok"))


def test_dummy_needs_a_config_alone(tmp_path: Path) -> None:
    tiny("qwen3").config.save_pretrained(tmp_path)
    refuse(tmp_path, "model.safetensors")
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": False}
    first, again, other = (load(tmp_path, seed=seed, **settings) for seed in (0, 0, 1))
    assert first.tokenizer is None
    ids = torch.arange(20)
    a, b, c = (m.model.logits(m.model(ids, ids, Causal(), m.model.rotary(64))[0]) for m in (first, again, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert a.isfinite().all()
    assert 0.1 < a.std() < 10


def refuse(path: Path, *parts: str, **settings: Any) -> None:
    with pytest.raises(ModelLoadError) as e:
        load(path, **settings)
    for part in parts:
        assert part in str(e.value)
    assert e.value.remedy


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "no such file or directory")
    refuse(tmp_path, "config.json")
    (tmp_path / "weights.bin").write_bytes(b"x" * 64)
    refuse(tmp_path / "weights.bin", "neither a directory nor a GGUF file")


def test_hub_name_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("name resolution failed")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=r"some/model.*name resolution failed.*local copy"):
        load_model(LoadConfig(model="some/model"))


@pytest.mark.parametrize(("text", "named"), [
    ("{not json", "JSON"), ("[1]", "no JSON object"), ('{"model_type": "llama"}', "num_attention_heads"),
    ('{"model_type": "llama", "num_attention_heads": "four"}', "config.json"),
])
def test_broken_configs(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refuse(tmp_path, "config.json", named)


def test_configs_that_are_not_supported(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, named in (({"quantization_config": {"quant_method": "gptq"}}, "quantised"), ({"model_type": "mamba"}, "mamba"),
                           ({"hidden_act": "gelu"}, "gelu")):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        refuse(tmp_path, named)


def test_broken_weights(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for data in (whole[:-100], whole[:50], b"", b"\xff" * 200):
        file.write_bytes(data)
        refuse(tmp_path, "model.safetensors", "not a complete safetensors file")
    file.unlink()
    refuse(tmp_path, "model.safetensors", "neither")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refuse(tmp_path, "weight_map")


def test_weights_of_another_model(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, named in (({"num_hidden_layers": 1}, "used by nothing"), ({"num_hidden_layers": 3}, "have no tensor"),
                           ({"intermediate_size": 80}, "mlp."), ({"model_type": "qwen3"}, "q_norm")):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        refuse(tmp_path, named)


def test_devices_and_formats(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    for settings in ({"device": "tpu"}, {"device": "cuda:99"}, {"load_format": "gguf"}):
        with pytest.raises(InvalidValueError) as e:
            load(tmp_path, **settings)
        assert e.value.field == next(iter(settings))
