"""Tiny random models as Hugging Face directories: real files of real architectures, which load and run in milliseconds.

    path = tiny_qwen3(seed=1, vocab_size=16)
    llm = LLM(str(path), skip_tokenizer_init=True)

Random weights of the usual size give flat distributions and attention that hardly matters, so that any draft view would
do. Here the head is scaled until the most likely token has a probability of about 0.4, and queries until attention is
peaked enough for a sparse view to be wrong now and then. There is no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsespec.config.model import ModelConfig
from sparsespec.models.registry import model_class

_TOP = 0.4  # median probability of the most likely token
_QUERY_SCALE = 1.5
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def tiny_llama(seed: int = 0, **settings: Any) -> Path:
    """Directory of a random Llama; see `tiny_model` for the settings."""
    return tiny_model("llama", seed, **settings)


def tiny_qwen2(seed: int = 0, **settings: Any) -> Path:
    """Directory of a random Qwen2, with biases on q, k and v; see `tiny_model`."""
    return tiny_model("qwen2", seed, **settings)


def tiny_qwen3(seed: int = 0, **settings: Any) -> Path:
    """Directory of a random Qwen3, with norms on q and k; see `tiny_model`."""
    return tiny_model("qwen3", seed, **settings)


def tiny_model(model_type: str, seed: int = 0, *, vocab_size: int = 256, num_layers: int = 2, hidden_size: int = 64,
               intermediate_size: int = 128, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16,
               max_position_embeddings: int = 2048, tie_word_embeddings: bool = False, head_scale: float | None = None,
               eos_token_id: int | list[int] | None = None, **overrides: Any) -> Path:
    """A directory with config.json and model.safetensors, float32, kept for the life of the temporary folder.

    model_type: llama, qwen2 or qwen3. The same arguments give the same directory, written once. head_scale: standard
    deviation of the head's weights; None: such that the median top-1 probability is 0.4. overrides: further keys of
    config.json (rope_parameters, attention_bias, ...).
    """
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]], "model_type": model_type, "vocab_size": vocab_size,
        "hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim, "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings, "tie_word_embeddings": tie_word_embeddings,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "dtype": "float32",
        "attention_bias": False, "mlp_bias": False, "bos_token_id": None, "eos_token_id": eos_token_id, **overrides}
    scale = median_scale(vocab_size, hidden_size) if head_scale is None else head_scale
    text = json.dumps(config, indent=1, sort_keys=True)
    key = hashlib.sha256(f"{text}|{seed}|{scale!r}".encode()).hexdigest()[:16]
    path = _folder() / f"{model_type}-{key}"
    if not (path / "config.json").is_file():
        path.mkdir(parents=True, exist_ok=True)
        _write(path, config, seed, scale)
        _replace(path / "config.json", text.encode())  # last: a directory that has it is complete
    return path


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="sparsespec-tiny-"))


def _replace(path: Path, data: bytes) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)


def tiny_eagle3(target: Path, seed: int = 0, *, draft_vocab_size: int | None = None, own_embedding: bool = False,
                **overrides: Any) -> Path:
    """Directory of a random EAGLE-3 head for the tiny model in `target`, in the public checkpoint format.

    draft_vocab_size: tokens that it knows, spread over the target's vocabulary; None: half of them. own_embedding: it brings
    embed_tokens instead of using the target's. overrides: further keys of config.json.
    """
    shape = json.loads((target / "config.json").read_text())
    size = draft_vocab_size or shape["vocab_size"] // 2
    shape |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": size,
              "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, **overrides}
    text = json.dumps(shape, indent=1, sort_keys=True)
    key = hashlib.sha256(f"{target}|{text}|{seed}|{own_embedding}".encode()).hexdigest()[:16]
    path = _folder() / f"eagle3-{key}"
    if not (path / "config.json").is_file():
        path.mkdir(parents=True, exist_ok=True)
        _save(path, _eagle3_tensors(ModelConfig.from_hf(shape, str(path)), size, seed, own_embedding))
        _replace(path / "config.json", text.encode())
    return path


def _eagle3_tensors(c: ModelConfig, draft_vocab_size: int, seed: int, own_embedding: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, q_size, kv_size = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = {"fc": (hidden, 3 * hidden), "norm": (hidden,), "midlayer.hidden_norm": (hidden,),
              "midlayer.input_layernorm": (hidden,), "midlayer.post_attention_layernorm": (hidden,),
              "midlayer.self_attn.q_proj": (q_size, 2 * hidden), "midlayer.self_attn.k_proj": (kv_size, 2 * hidden),
              "midlayer.self_attn.v_proj": (kv_size, 2 * hidden), "midlayer.self_attn.o_proj": (hidden, q_size),
              "midlayer.mlp.gate_proj": (c.intermediate_size, hidden), "midlayer.mlp.up_proj": (c.intermediate_size, hidden),
              "midlayer.mlp.down_proj": (hidden, c.intermediate_size), "lm_head": (draft_vocab_size, hidden)}
    if own_embedding:
        shapes["embed_tokens"] = (c.vocab_size, hidden)
    scale = median_scale(draft_vocab_size, hidden)
    tensors = {f"{name}.weight": _weight(f"{name}.weight", torch.randn(shape, generator=generator), scale, tied=False)
               for name, shape in shapes.items()}
    known = torch.randperm(c.vocab_size, generator=generator)[:draft_vocab_size].sort().values
    tensors["d2t"] = known - torch.arange(draft_vocab_size)
    tensors["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool).index_fill_(0, known, True)
    return tensors


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save

    _replace(path / "model.safetensors", save(tensors, metadata={"format": "pt"}))


def _write(path: Path, config: dict[str, Any], seed: int, head_scale: float) -> None:
    shape = ModelConfig.from_hf(config, str(path))
    model = model_class(shape.model_type, str(path))(shape, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, target in model.weight_targets().items():
        noise = torch.randn(target.shape, generator=generator)
        tensors[name] = _weight(name, noise, head_scale, tied=shape.tie_word_embeddings)
    _save(path, tensors)


def _weight(name: str, noise: Tensor, head_scale: float, *, tied: bool) -> Tensor:
    """Weights from standard normal noise of their shape."""
    if name.endswith("norm.weight"):
        return (_QUERY_SCALE if "q_norm" in name else 1.0) * (1 + 0.1 * noise)
    if name.endswith(".bias"):
        return 0.2 * noise
    if name == "lm_head.weight" or (tied and "embed_tokens" in name):
        return head_scale * noise
    if "embed_tokens" in name:
        return noise
    deviation: float = noise.shape[-1] ** -0.5 * (_QUERY_SCALE if "q_proj" in name else 1.0)
    return noise * deviation


@cache
def median_scale(vocab_size: int, hidden_size: int, top: float = _TOP) -> float:
    """Standard deviation of head weights at which the median top-1 probability is `top`.

    After the final norm a hidden state has the length sqrt(hidden_size), so logits are normal with sqrt(hidden_size)
    times this deviation, and the answer depends on the vocabulary alone.
    """
    noise = torch.randn(512, vocab_size, generator=torch.Generator().manual_seed(0))
    low, high = 0.0, 50.0
    for _ in range(40):
        middle = (low + high) / 2
        found = float((noise * middle).softmax(-1).amax(-1).median())
        low, high = (middle, high) if found < top else (low, middle)
    return float(middle / hidden_size**0.5)
