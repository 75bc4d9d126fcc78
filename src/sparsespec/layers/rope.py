"""Rotary position embedding with Hugging Face's rotate-half convention, from tables built once for all positions.

    rope = RotaryEmbedding(config, max_len=8192, device=torch.device("cpu"))
    q, k = rope(q, k, positions)

A table is fixed for an engine's life, so a cached key never disagrees with a later query. Two kinds depend on the
length of the sequence in Hugging Face: 'dynamic' rescales once a sequence passes `max_position_embeddings`, 'longrope'
changes its factors once it passes `original_max_position_embeddings`. Here `max_len` decides for all sequences. Tables
equal Hugging Face's for max_len up to that limit; past it they equal those of a sequence of max_len tokens, so
sequences that stay below the limit get other angles than there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparsespec.config.model import ModelConfig
from sparsespec.core.errors import ModelLoadError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def _plain(theta: float, dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    inverse: Tensor = 1.0 / (theta**exponents)
    return inverse


def _llama3(rope: dict[str, Any], inv_freq: Tensor, trained: int) -> Tensor:
    """Llama 3.1: divide low frequencies by the factor, keep high ones, blend between."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    old = rope.get("original_max_position_embeddings") or trained
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > old / low, inv_freq / factor, inv_freq)
    smooth = (old / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < old / high) & ~(wavelength > old / low)
    return torch.where(between, blended, scaled)


def _by_transformers(config: ModelConfig, kind: str, max_len: int) -> tuple[Tensor, float]:
    """The remaining kinds, by transformers' own functions; imported late, as that takes a second."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {k: v for k, v in config.rope.items() if k != "type"}
    hf = LlamaConfig(hidden_size=config.num_heads * config.head_dim, num_attention_heads=config.num_heads,
                     head_dim=config.head_dim, max_position_embeddings=config.max_position_embeddings,
                     rope_parameters=parameters)
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), seq_len=max_len)
    return inv_freq, float(scale)


def frequencies(config: ModelConfig, max_len: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] in float32 on the CPU, and the factor on cos and sin.

    Raises ModelLoadError for a kind that is not known or whose keys are missing or unusable.
    """
    rope = config.rope
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ModelLoadError("rope_type", kind, "not a known kind of rotary embedding", f"Supported: {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelLoadError("partial_rotary_factor", rope["partial_rotary_factor"],
                             "rotating a part of a head is not supported", "Use a model that rotates whole heads")
    if config.head_dim % 2:
        raise ModelLoadError("head_dim", config.head_dim, "odd, so it has no halves to rotate", "Check the config")
    try:
        if kind in ("default", "llama3"):
            inv_freq = _plain(float(rope.get("rope_theta", 10000.0)), config.head_dim)
            return (_llama3(rope, inv_freq, config.max_position_embeddings) if kind == "llama3" else inv_freq), 1.0
        for key in ("short_factor", "long_factor") if kind == "longrope" else ():
            if len(rope[key]) != config.head_dim // 2:
                raise ValueError(f"{key} holds {len(rope[key])} factors, not {config.head_dim // 2}")
        return _by_transformers(config, kind, max_len)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, RuntimeError) as e:
        raise ModelLoadError("rope_parameters", rope, f"unusable for rope_type {kind!r} ({type(e).__name__}: {e})",
                             "Check the rope_parameters or rope_scaling of the config") from e


class RotaryEmbedding:
    """Tables cos and sin, each [max_len, head_dim] in float32, and the rotation by them.

    `sin` holds the sine with its first half negated: rotating is then x · cos + swapped halves of x · sin.
    """

    def __init__(self, config: ModelConfig, max_len: int, device: torch.device) -> None:
        inv_freq, scale = frequencies(config, max_len)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32, device=device), inv_freq.to(device))
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self.max_len = max_len
        self.cos = torch.cat((cos, cos), -1)
        self.sin = torch.cat((-sin, sin), -1)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, head_dim] in `dtype` of positions [N], for `apply_rope`; once a step serves all layers."""
        return self.cos[positions].to(dtype).unsqueeze(1), self.sin[positions].to(dtype).unsqueeze(1)

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q [N, heads, D] and k [N, KV heads, D] by positions [N] below max_len."""
        cos, sin = self.tables(positions, q.dtype)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [N, heads, D] by what `RotaryEmbedding.tables` gave, in x's dtype."""
    first, second = x.chunk(2, -1)
    return (x * cos).add_(torch.cat((second, first), -1).mul_(sin))
