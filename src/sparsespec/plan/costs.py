"""What one iteration costs on a GPU: curves from a JSON file, and the model's shape.

A file in plan/gpus/ is a GPU; `--gpu FILE` takes an edited copy. Its keys:

- gemm: model name → rows and ms of all matrix products of one iteration (a model without a curve takes the one of the
  nearest size, scaled by the number of weights: products are bound by reading weights or by arithmetic, both linear in it)
- attention: KV gigabytes of an iteration and the gigabytes a second at which full attention reads them
- step_overhead_ms: the part of a step that neither rows nor KV explain
- sparse_efficiency: bandwidth on gathered entries as a share of that on full ones
- scoring_overhead: extra share of a verification's attention for choosing the next drafts' view
- cpu_ms: the CPU's work between two steps, `base` and `per_request`
- host_link_gigabytes_per_second, memory_gib, workspace_gib, name, derived (true: not measured), sources (text a key)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sparsespec.config.fields import check_range, from_dict
from sparsespec.config.model import ModelConfig
from sparsespec.core.errors import InvalidValueError

_GPUS = Path(__file__).parent / "gpus"
_SEE = "Start from a copy of sparsespec/plan/gpus/h200.json"
_GIB = 1024**3
_UTILIZATION = 0.92  # the engine's default gpu_memory_utilization
_ITEMSIZE = 2  # bfloat16


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> ModelConfig:
    return ModelConfig("qwen3", 151936, hidden, intermediate, layers, heads, 8, 128, tie_word_embeddings=tied)


MODELS = {"qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True), "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
          "qwen3-14b": _qwen3(5120, 17408, 40, 40, False)}


def load_model(name: str) -> ModelConfig:
    """A shape by name, or from a Hugging Face config.json."""
    if name in MODELS:
        return MODELS[name]
    if not Path(name).is_file():
        raise InvalidValueError("model", name, "neither a known model nor a file",
                                f"Choose from: {', '.join(MODELS)}, or give a config.json")
    return ModelConfig.from_hf(_read_json("model", name), name)


def product_weights(model: ModelConfig) -> int:
    """Weights that an iteration multiplies with: all layers and the head, not the embedding."""
    heads = (model.num_heads + model.num_kv_heads) * 2 * model.head_dim  # q and o, k and v
    return model.num_layers * model.hidden_size * (heads + 3 * model.intermediate_size) + model.vocab_size * model.hidden_size


@dataclass(frozen=True)
class Curve:
    """ys over ascending xs: straight between points, level before and after them."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @classmethod
    def read(cls, where: str, values: Any, x: str, y: str) -> Curve:
        """From {x: [...], y: [...]}; raises InvalidValueError naming what is wrong."""
        if not isinstance(values, dict) or set(values) != {x, y}:
            raise InvalidValueError(where, values, f"not an object with {x} and {y}", _SEE)
        xs, ys = values[x], values[y]
        for key, numbers in ((x, xs), (y, ys)):
            if not isinstance(numbers, list) or not numbers or not all(_positive(v) for v in numbers):
                raise InvalidValueError(f"{where}.{key}", numbers, "not a list of positive numbers", "Give measured points")
        if len(xs) != len(ys):
            raise InvalidValueError(f"{where}.{y}", ys, f"{len(ys)} values for {len(xs)} points", "Give one value a point")
        if any(b <= a for a, b in pairwise(xs)):
            raise InvalidValueError(f"{where}.{x}", xs, "not ascending", "Sort the points")
        return cls(tuple(map(float, xs)), tuple(map(float, ys)))

    def __call__(self, x: float) -> float:
        return float(np.interp(x, self.xs, self.ys))


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _read_json(field_name: str, path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise InvalidValueError(field_name, path, f"not a readable JSON file ({e})", "Check the file") from None
    if not isinstance(found, dict):
        raise InvalidValueError(field_name, path, "does not hold a JSON object", "Check the file")
    return found


@dataclass(frozen=True)
class Gpu:
    """A GPU's measured or derived costs; fields as in the module's description."""

    name: str
    gemm: dict[str, Any]
    attention: dict[str, Any]
    step_overhead_ms: float
    sparse_efficiency: float
    scoring_overhead: float
    cpu_ms: dict[str, float]
    host_link_gigabytes_per_second: float
    memory_gib: float
    workspace_gib: float = 0.0
    derived: bool = False
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("host_link_gigabytes_per_second", "memory_gib", "sparse_efficiency"):
            check_range(f"gpu.{name}", getattr(self, name), 1e-6, integer=False)
        for name in ("step_overhead_ms", "scoring_overhead", "workspace_gib"):
            check_range(f"gpu.{name}", getattr(self, name), 0, integer=False)
        if not isinstance(self.cpu_ms, dict) or set(self.cpu_ms) != {"base", "per_request"}:
            raise InvalidValueError("gpu.cpu_ms", self.cpu_ms, "not an object with base and per_request",
                                    'Give such as {"base": 1, "per_request": 0.01}')
        for key, value in self.cpu_ms.items():
            check_range(f"gpu.cpu_ms.{key}", value, 0, integer=False)
        if not isinstance(self.gemm, dict) or not self.gemm or not set(self.gemm) <= set(MODELS):
            raise InvalidValueError("gpu.gemm", self.gemm, "does not name known models", f"Known: {', '.join(MODELS)}")
        for name, values in self.gemm.items():
            Curve.read(f"gpu.gemm.{name}", values, "rows", "ms")
        Curve.read("gpu.attention", self.attention, "gigabytes", "gigabytes_per_second")

    @classmethod
    def load(cls, name: str) -> Gpu:
        """A shipped GPU by name, or a JSON file."""
        shipped = {p.stem: p for p in sorted(_GPUS.glob("*.json"))}
        path = shipped.get(name, Path(name))
        if not path.is_file():
            raise InvalidValueError("gpu", name, "neither a shipped GPU nor a file",
                                    f"Choose from: {', '.join(shipped)}, or give a JSON file")
        values = _read_json("gpu", str(path))
        needed = ("name", "gemm", "attention", "step_overhead_ms", "sparse_efficiency", "scoring_overhead", "cpu_ms",
                  "host_link_gigabytes_per_second", "memory_gib")
        if missing := [key for key in needed if key not in values]:
            raise InvalidValueError("gpu", name, f"lacks {', '.join(missing)}", _SEE)
        return from_dict(cls, values, "gpu")


class CostModel:
    """Milliseconds of an iteration's parts, for one model on one GPU. KV sizes are in tokens over all requests."""

    def __init__(self, gpu: Gpu, model: ModelConfig) -> None:
        self.gpu, self.model = gpu, model
        self.kv_bytes = model.kv_bytes_per_token(_ITEMSIZE)
        weights = product_weights(model)
        nearest = min(gpu.gemm, key=lambda name: abs(np.log(product_weights(MODELS[name]) / weights)))
        self.scaled_from = None if product_weights(MODELS[nearest]) == weights else nearest
        self._scale = weights / product_weights(MODELS[nearest])
        self._gemm = Curve.read("gpu.gemm", gpu.gemm[nearest], "rows", "ms")
        self._bandwidth = Curve.read("gpu.attention", gpu.attention, "gigabytes", "gigabytes_per_second")
        self._attention_ms_a_pair = (self._gemm.ys[-1] / self._gemm.xs[-1] / product_weights(MODELS[nearest])
                                     * 2 * model.num_layers * model.num_heads * model.head_dim)

    def gemm(self, rows: float) -> float:
        """All matrix products over `rows` rows. Past the curve, time grows with the rows."""
        if rows <= 0:
            return 0.0
        return self._scale * self._gemm(rows) * max(1.0, rows / self._gemm.xs[-1])

    def attention(self, full: float, sparse: float = 0.0, scored: bool = False) -> float:
        """Reading `full` tokens' KV in place (scored: and choosing the next view) and `sparse` gathered ones."""
        tokens = full * (1 + self.gpu.scoring_overhead * scored) + sparse / self.gpu.sparse_efficiency
        gigabytes = tokens * self.kv_bytes / 1e9
        return gigabytes / self._bandwidth(gigabytes) * 1e3

    def prefill_attention(self, rows: float, context: float) -> float:
        """Arithmetic of `rows` new query rows that end at `context` tokens, causal, at the rate of the matrix products."""
        return self._attention_ms_a_pair * rows * (context - rows / 2)

    def overhead(self) -> float:
        """The rest of a step on the device."""
        return self.gpu.step_overhead_ms

    def cpu(self, requests: float) -> float:
        """The CPU's work between two steps of `requests` requests."""
        return self.gpu.cpu_ms["base"] + self.gpu.cpu_ms["per_request"] * requests

    def step(self, device: float, requests: float, verification: str) -> float:
        """A step whose device part takes `device` ms: the CPU's part comes after it (sync) or runs beside it."""
        cpu = self.cpu(requests)
        return device + cpu if verification == "sync" else max(device, cpu)

    def transfer(self, tokens: float) -> float:
        """Moving the KV of `tokens` tokens between device and host, one way."""
        return tokens * self.kv_bytes / self.gpu.host_link_gigabytes_per_second / 1e6

    def pool_tokens(self) -> int:
        """Tokens of KV that fit beside the weights."""
        embedding = 0 if self.model.tie_word_embeddings else self.model.vocab_size * self.model.hidden_size
        weights = (product_weights(self.model) + embedding) * _ITEMSIZE
        free = (self.gpu.memory_gib * _UTILIZATION - self.gpu.workspace_gib) * _GIB - weights
        if free < self.kv_bytes:
            raise InvalidValueError("gpu", self.gpu.name, f"the weights take {weights / _GIB:.1f} of its {self.gpu.memory_gib} GiB",
                                    "Choose a smaller model or a larger GPU")
        return int(free // self.kv_bytes)
