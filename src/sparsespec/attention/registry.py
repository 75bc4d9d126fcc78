"""Which attention backends exist, and which one a device gets by default."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from sparsespec.attention.base import AttentionBackend
from sparsespec.config.model import ModelConfig
from sparsespec.core.errors import InvalidValueError
from sparsespec.kv.pool import KVPool

BACKENDS = {  # imported when asked for: Triton is not everywhere
    "torch": "sparsespec.attention.torch_ref:TorchBackend",
    "torch_deterministic": "sparsespec.attention.torch_deterministic:DeterministicBackend",
    "triton": "sparsespec.attention.triton:TritonBackend",
}


def backend_class(name: str) -> type[AttentionBackend]:
    """The class behind a name. Raises InvalidValueError for an unknown one, or for one whose packages are missing."""
    if name not in BACKENDS:
        raise InvalidValueError("attention_backend", name, "unknown backend", f"Choose from: auto, {', '.join(sorted(BACKENDS))}")
    module, attribute = BACKENDS[name].split(":")
    if name == "triton" and find_spec("triton") is None:
        raise InvalidValueError("attention_backend", name, "Triton is not installed", "Install triton, or use 'torch'")
    found: type[AttentionBackend] = getattr(import_module(module), attribute)
    return found


def make_backend(name: str, deterministic: bool, config: ModelConfig, pool: KVPool, max_drafts: int = 8) -> AttentionBackend:
    """The backend called `name`; 'auto' picks one. max_drafts: longest round. Raises InvalidValueError for an unknown name."""
    if name == "auto":
        fast = "triton" if pool.device.type == "cuda" and find_spec("triton") is not None else "torch"
        name = "torch_deterministic" if deterministic else fast
    return backend_class(name)(config, pool, max_drafts)
