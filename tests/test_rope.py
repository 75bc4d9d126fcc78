"""Rotary embedding against Hugging Face's, for every kind it has for Llama and Qwen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsespec.config.model import ModelConfig
from sparsespec.core.errors import ModelLoadError
from sparsespec.layers.rope import RotaryEmbedding, apply_rope

CPU = torch.device("cpu")
HEAD, TRAINED = 32, 256
RATES = [1.0 + i / 7 for i in range(HEAD // 2)]
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, all keys": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64,
                       "beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 0.9},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": RATES, "long_factor": [2 * r for r in RATES],
                 "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
}


def config_of(rope: dict[str, Any], **changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {"head_dim": HEAD, "max_position_embeddings": TRAINED} | changes
    return ModelConfig("llama", 64, 4 * HEAD, 64, 1, 4, 2, rope=rope, **sizes)


def reference(rope: dict[str, Any], positions: torch.Tensor,
              dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Hugging Face's cos and sin [N, D] for one sequence with these positions."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = LlamaConfig(hidden_size=4 * HEAD, num_attention_heads=4, num_key_value_heads=2, head_dim=HEAD,
                     max_position_embeddings=TRAINED, rope_parameters=dict(rope))
    cos, sin = LlamaRotaryEmbedding(hf)(torch.empty(1, dtype=dtype), positions[None])
    return cos[0], sin[0]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    out: torch.Tensor = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=1)[0]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_hugging_face(kind: str, dtype: torch.dtype) -> None:
    """Bit for bit, at shuffled positions, with a table as long as the sequence that Hugging Face sees."""
    rope = KINDS[kind]
    torch.manual_seed(0)
    length = TRAINED
    positions = torch.randperm(length)
    q, k = torch.randn(length, 4, HEAD, dtype=dtype), torch.randn(length, 2, HEAD, dtype=dtype)
    cos, sin = reference(rope, positions, dtype)
    got_q, got_k = RotaryEmbedding(config_of(rope), length, CPU)(q, k, positions)
    assert torch.equal(got_q, rotated(q, cos, sin))
    assert torch.equal(got_k, rotated(k, cos, sin))


def test_kinds_differ() -> None:
    """Otherwise parity above would hold for a table that ignores the kind."""
    tables = [RotaryEmbedding(config_of(rope), TRAINED, CPU).cos for name, rope in KINDS.items() if name != "dynamic"]
    assert all(not torch.allclose(a, b, atol=1e-3) for i, a in enumerate(tables) for b in tables[:i])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("length", [48, 2 * TRAINED])
def test_length_decides(kind: str, length: int) -> None:
    """The kinds that look at the sequence: max_len stands for it, on both sides of the limit."""
    rope = KINDS[kind]
    positions = torch.arange(length)
    cos, sin = reference(rope, positions)
    table = RotaryEmbedding(config_of(rope), length, CPU)
    x = torch.randn(length, 2, HEAD)
    assert torch.allclose(table(x, x, positions)[0], rotated(x, cos, sin), atol=1e-6)


def test_legacy_type_key() -> None:
    """Configs of older releases call the kind 'type'."""
    hf = {"model_type": "llama", "vocab_size": 8, "hidden_size": 128, "intermediate_size": 8, "num_hidden_layers": 1,
          "num_attention_heads": 4, "max_position_embeddings": TRAINED, "rope_theta": 1e4,
          "rope_scaling": {"type": "linear", "factor": 4.0}}
    table = RotaryEmbedding(ModelConfig.from_hf(hf, "config.json"), 16, CPU)
    assert torch.equal(table.cos, RotaryEmbedding(config_of(KINDS["linear"]), 16, CPU).cos)


def test_tables_serve_fused_heads() -> None:
    """Rotating q and k in one tensor equals rotating each."""
    rope = RotaryEmbedding(config_of(KINDS["default"]), 32, CPU)
    positions, qk = torch.tensor([3, 0, 31]), torch.randn(3, 6, HEAD)
    before = qk.clone()
    q, k = rope(qk[:, :4], qk[:, 4:], positions)
    assert torch.equal(apply_rope(qk, *rope.tables(positions, qk.dtype)), torch.cat((q, k), 1))
    assert torch.equal(qk, before)  # the input is the caller's
    assert rope.cos.shape == rope.sin.shape == (32, HEAD)


@pytest.mark.parametrize(("rope", "changes", "named"), [
    ({"rope_type": "spiral"}, {}, "spiral"),
    ({"rope_type": "linear", "rope_theta": 1e4}, {}, "factor"),
    ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}, {}, "low_freq_factor"),
    ({"rope_type": "default", "rope_theta": "x"}, {}, "rope_theta"),
    ({"rope_type": "longrope", "rope_theta": 1e4, "factor": 1.0, "short_factor": [1.0], "long_factor": [1.0] * 16,
      "original_max_position_embeddings": TRAINED}, {}, "short_factor holds 1"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, {}, "partial_rotary_factor"),
    ({"rope_type": "default"}, {"head_dim": 7}, "odd"),
])
def test_unusable(rope: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        RotaryEmbedding(config_of(rope, **changes), 16, CPU)
