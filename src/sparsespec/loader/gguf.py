"""GGUF files: metadata as a Hugging Face config, tensors under their Hugging Face names.

The container is read by the `gguf` package. Of llama files the rows of q and k are put back into Hugging Face's order:
llama.cpp rotates neighbouring pairs, so its converter interleaves the two halves of each head.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsespec.config.model import ModelConfig
from sparsespec.core.errors import ModelLoadError
from sparsespec.loader.dequant import SUPPORTED, dequantize

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_FACTORS = "rope_freqs.weight"
_PERMUTED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that is named or begins like a GGUF file."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as f:
        return f.read(4) == b"GGUF"


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; one that has none stays as it is, and loading reports it as unused."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    found = _OUTER.get(stem) if layer is None else _INNER.get(stem)
    if found is None:
        return name
    return f"{found}.{kind}" if layer is None else f"model.layers.{layer}.{found}.{kind}"


class GGUFFile:
    """One GGUF file, opened. Raises ModelLoadError for one that cannot be read, is cut short or of an unknown architecture."""

    def __init__(self, path: Path) -> None:
        from sparsespec.loader.gguf_reader import FastReader

        self.path, self.where = path, str(path)
        try:
            # copy-on-write: torch wants writable memory, though nothing writes
            self.reader = FastReader(path, "c")
        except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError, OSError, struct.error) as e:
            raise self._error(f"not a complete GGUF file ({type(e).__name__}: {e})", "Download it again") from e
        if self.reader.byte_order != "I":
            raise self._error("its byte order is not this machine's", "Use a little-endian file")
        self.tensors = {t.name: t for t in self.reader.tensors}
        self.architecture = str(self.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise self._error(f"architecture {self.architecture!r} is not supported", f"Supported: {', '.join(ARCHITECTURES)}")
        self.config = ModelConfig.from_hf(self._hf_config(), self.where)
        for t in self.reader.tensors:
            if t.tensor_type.name not in SUPPORTED:
                raise self._error(f"tensor {t.name} has type {t.tensor_type.name}, which is not supported",
                                  f"Use a file with only {', '.join(SUPPORTED)}")

    def _error(self, problem: str, remedy: str) -> ModelLoadError:
        return ModelLoadError("model", self.where, problem, remedy)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a metadata key: a scalar, a string or a list."""
        field = self.reader.get_field(key)
        try:
            return default if field is None else field.contents()
        except (UnicodeDecodeError, IndexError, ValueError) as e:
            raise self._error(f"metadata {key!r} is not readable ({e})", "Download it again") from e

    def _number(self, key: str, default: Any = None) -> Any:
        value = self.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self._error(f"its metadata has no {self.architecture}.{key}", "Convert the model again")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._error(f"{self.architecture}.{key} is {str(value)[:80]}, not one number",
                              "Use a model whose layers are all alike")
        return value

    def _hf_config(self) -> dict[str, Any]:
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise self._error("it has no tensor token_embd.weight", "Use a file that holds a whole model")
        heads, hidden = self._number("attention.head_count"), self._number("embedding_length")
        head_dim = self._number("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._number(key, head_dim) != head_dim:
                raise self._error(f"{self.architecture}.{key}={self._number(key)} differs from the head size {head_dim}",
                                  "Use a model that rotates whole heads of one size")
        return {
            "model_type": self.architecture, "vocab_size": int(embedding.shape[1]), "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"), "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads, "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim, "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(head_dim), "max_position_embeddings": self._number("context_length"),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors, "mlp_bias": "blk.0.ffn_up.bias" in self.tensors,
            "eos_token_id": self._eos(), "bos_token_id": self.get("tokenizer.ggml.bos_token_id"), "dtype": "bfloat16",
        }

    def _eos(self) -> list[int]:
        """The end tokens: end of text, and end of turn where the file has one."""
        ids = (self.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot"))
        return list(dict.fromkeys(i for i in ids if i is not None))

    def _rope(self, head_dim: int) -> dict[str, Any]:
        """The rotary embedding in Hugging Face's terms. Raises ModelLoadError for a key that has none there."""
        theta, trained = self._number("rope.freq_base", 10000.0), self._number("context_length")
        prefix = f"{self.architecture}.rope.scaling."
        scaling = {key.removeprefix(prefix): self.get(key) for key in self.reader.fields if key.startswith(prefix)}
        scaling.pop("finetuned", None)
        kind = scaling.pop("type", "none")
        linear = self.get(f"{self.architecture}.rope.scale_linear")  # older files
        if linear not in (None, 1.0):
            kind, scaling = "linear", {"factor": linear}
        if _FACTORS in self.tensors:
            if kind != "none":
                raise self._error(f"it has both {_FACTORS} and rope scaling {kind!r}", "Convert the model again")
            t = self.tensors[_FACTORS]
            factors = dequantize(_bytes(t.data), "F32").tolist() if t.tensor_type.name == "F32" else []
            if len(factors) != head_dim // 2:
                raise self._error(f"{_FACTORS} does not hold {head_dim // 2} float32 factors", "Convert the model again")
            # a divisor a frequency, whatever the length: the form that longrope's factors have
            return {"rope_type": "longrope", "rope_theta": theta, "short_factor": factors, "long_factor": factors,
                    "factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": trained}
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        names = {"factor": "factor"}
        if kind == "yarn":
            names |= {"original_context_length": "original_max_position_embeddings", "yarn_beta_fast": "beta_fast",
                      "yarn_beta_slow": "beta_slow"}
        unknown = sorted(key for key in scaling if key not in names and key != "original_context_length")
        if kind not in ("linear", "yarn") or unknown:
            raise self._error(f"rope scaling {kind!r} with {', '.join(unknown) or 'its keys'} is not supported",
                              "Supported: linear and yarn without attention factors, and rope_freqs.weight")
        return {"rope_type": kind, "rope_theta": theta, **{names[k]: v for k, v in scaling.items() if k in names}}

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, values), one tensor at a time; quantised ones in float32."""
        for t in self.reader.tensors:
            if t.name == _FACTORS:
                continue  # part of the config
            raw = _bytes(t.data)
            if self.architecture == "llama" and _PERMUTED.fullmatch(t.name):
                heads = self.config.num_heads if ".attn_q." in t.name else self.config.num_kv_heads
                if t.data.shape[0] != heads * self.config.head_dim:
                    raise self._error(f"tensor {t.name} has {t.data.shape[0]} rows, "
                                      f"not {heads} heads of {self.config.head_dim}", "Convert the model again")
                width = raw.numel() // t.data.shape[0]  # rows move whole, so this works on the quantised bytes
                raw = raw.view(heads, -1, 2, width).transpose(1, 2).reshape(raw.shape)
            yield hf_name(t.name), dequantize(raw, t.tensor_type.name)


def _bytes(data: np.ndarray[Any, Any]) -> Tensor:
    """An array's bytes [..., bytes of a row] without a copy."""
    return torch.from_numpy(data.view(np.uint8))
