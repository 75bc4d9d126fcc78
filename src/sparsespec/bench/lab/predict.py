"""What measured drafting would gain on a GPU: SparseSpec's speed-up model (arXiv 2512.01278, section 3).

A step of B requests takes T_gemm(rows) + T_attn(bytes of KV). Plain decoding has B rows and reads M bytes. A round that
makes p passes, computes r rows and gives t tokens, spread over staggered requests, costs p/t steps a token of B·r/p rows
each. With the KV bytes a token as a share of plain decoding's, all of it is measured and holds for every policy. A sparse
self-draft of k tokens has p = k + 1, r = 2k + 1 and a share of (ks + 1)/(kα + 1), which gives the paper's formula. What a
separate draft head or a look-up costs is not in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsespec.config.fields import from_dict
from sparsespec.config.model import ModelConfig
from sparsespec.core.errors import InvalidValueError

if TYPE_CHECKING:
    from sparsespec.loader.loaded import LoadedModel

_BYTES = 2  # weights and KV in bfloat16


@dataclass(frozen=True)
class Gpu:
    """What was measured there. milliseconds: all matrix products of a step, by rows, for `parameters` weights."""

    name: str
    rows: tuple[float, ...]
    milliseconds: tuple[float, ...]
    parameters: float
    read_bytes_per_second: float


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig("qwen3", 151936, hidden, intermediate, layers, heads, 8, 128)


def _parameters(c: ModelConfig) -> int:
    """Weights that a step multiplies with: the layers' and the head's."""
    attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size) + c.vocab_size * c.hidden_size


MODELS = {"qwen3-1.7b": _qwen3(2048, 6144, 28, 16), "qwen3-8b": _qwen3(4096, 12288, 36, 32),
          "qwen3-14b": _qwen3(5120, 17408, 40, 40)}
# Matrix products of Qwen3-8B in bfloat16 (36 layers and the head), torch 2.11, CUDA 13.
GPUS = {g.name: g for g in (Gpu(
    "h200", (1, 64, 128, 192, 256, 384, 512, 768, 1024, 2048), (4.7, 4.9, 5.0, 6.3, 6.5, 8.9, 11.3, 17.3, 23.5, 46.4),
    _parameters(MODELS["qwen3-8b"]), 4.33e12),)}


class Costs:
    """Milliseconds of a step's parts for one model on one GPU."""

    def __init__(self, gpu: Gpu, model: ModelConfig) -> None:
        self.gpu, self.scale = gpu, _parameters(model) / gpu.parameters
        self.kv_bytes = model.kv_bytes_per_token(_BYTES)

    def gemm(self, rows: float) -> float:
        """All matrix products over `rows` rows; past the curve they grow with the rows, and with the weights everywhere."""
        beyond = max(1.0, rows / self.gpu.rows[-1])
        return float(np.interp(rows, self.gpu.rows, self.gpu.milliseconds)) * beyond * self.scale

    def attention(self, tokens: float) -> float:
        """Reading the KV of `tokens` tokens."""
        return tokens * self.kv_bytes / self.gpu.read_bytes_per_second * 1e3


@dataclass(frozen=True)
class Round:
    """Means over measured rounds of one request. kv_share: KV bytes a token, relative to plain decoding at the same contexts."""

    passes: float
    rows: float
    tokens: float
    kv_share: float


@dataclass(frozen=True)
class Scenario:
    """Where it would run: `batch` requests of `context` tokens each (None: the measured context)."""

    gpu: str
    model: str
    costs: Costs
    batch: int
    context: int | None

    def speedup(self, r: Round, context: float) -> float:
        """Tokens a second over those of plain decoding."""
        attention = self.costs.attention(self.batch * (self.context or context))
        per_pass = r.tokens / r.passes
        step = self.costs.gemm(self.batch * r.rows / r.passes) + per_pass * r.kv_share * attention
        return per_pass * (self.costs.gemm(self.batch) + attention) / step

    def describe(self) -> dict[str, Any]:
        """As plain data."""
        return {"gpu": self.gpu, "model": self.model, "batch": self.batch, "context": self.context}


def scenario(gpu: str, model: str, batch: int, context: int | None, loaded: LoadedModel) -> Scenario:
    """From the names a user gives. Raises InvalidValueError, or ModelLoadError for a directory that is none."""
    return Scenario(gpu, loaded.name if model == "this" else model, Costs(_gpu(gpu), _model(model, loaded)), batch, context)


def _gpu(name: str) -> Gpu:
    if name in GPUS:
        return GPUS[name]
    remedy = f"Choose from {', '.join(GPUS)}, or give a JSON file with {', '.join(Gpu.__dataclass_fields__)}"
    try:
        gpu: Gpu = from_dict(Gpu, json.loads(Path(name).read_text(encoding="utf-8")), "gpu")
        fine = len(gpu.rows) == len(gpu.milliseconds) > 0 and list(gpu.rows) == sorted(gpu.rows) and min(
            *gpu.rows, *gpu.milliseconds, gpu.parameters, gpu.read_bytes_per_second) > 0
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise InvalidValueError("gpu", name, f"no curve of a GPU ({e})", remedy) from e
    if not fine:
        raise InvalidValueError("gpu", name, "rows must rise, have a time each, and all values be positive", remedy)
    return gpu


def _model(name: str, loaded: LoadedModel) -> ModelConfig:
    if name == "this":
        return loaded.config
    if name in MODELS:
        return MODELS[name]
    from sparsespec.loader.safetensors import HFDirectory, find_model

    return HFDirectory(find_model(name)).config
