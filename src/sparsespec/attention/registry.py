"""Which attention backends exist, and which one a device gets by default."""

from __future__ import annotations

from sparsespec.attention.base import AttentionBackend
from sparsespec.attention.torch_deterministic import DeterministicBackend
from sparsespec.attention.torch_ref import TorchBackend
from sparsespec.config.model import ModelConfig
from sparsespec.core.errors import InvalidValueError
from sparsespec.kv.pool import KVPool

BACKENDS: dict[str, type[AttentionBackend]] = {b.name: b for b in (TorchBackend, DeterministicBackend)}


def make_backend(name: str, deterministic: bool, config: ModelConfig, pool: KVPool) -> AttentionBackend:
    """The backend called `name`; 'auto' picks one. Raises InvalidValueError for an unknown name."""
    if name == "auto":
        name = DeterministicBackend.name if deterministic else TorchBackend.name
    if name not in BACKENDS:
        raise InvalidValueError("attention_backend", name, "unknown backend", f"Choose from: auto, {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](config, pool)
