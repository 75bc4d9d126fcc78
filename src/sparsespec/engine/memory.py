"""How many tokens of KV the device can hold."""

from __future__ import annotations

import os

import torch

from sparsespec.config.engine import EngineConfig
from sparsespec.core.errors import InvalidValueError
from sparsespec.loader.loaded import LoadedModel

_CPU_SHARE = 0.4  # of free memory: the rest is the user's
_ACTIVATIONS = 1 << 30  # bytes kept free on a GPU for activations and workspaces


def pool_tokens(config: EngineConfig, loaded: LoadedModel, max_model_len: int, head_bytes: int = 0) -> int:
    """Tokens of the device pool, in whole pages: what was asked, else what the memory allows and the requests can use.

    head_bytes: what a draft head keeps of each token besides.
    """
    size = config.cache.page_size
    asked = config.cache.kv_cache_tokens
    if asked is not None:
        if asked < size:
            raise InvalidValueError("kv_cache_tokens", asked, f"less than one page of {size} tokens", "Raise it or lower page_size")
        return asked // size * size
    per_token = loaded.config.kv_bytes_per_token(loaded.dtype.itemsize) + head_bytes
    if loaded.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(loaded.device)
        room = int(free - (1 - config.cache.gpu_memory_utilization) * total - _ACTIVATIONS)
    else:
        room = int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE)
    tokens = min(room // per_token, config.scheduler.max_num_seqs * max_model_len)
    if tokens < size:
        raise InvalidValueError("gpu_memory_utilization", config.cache.gpu_memory_utilization, "no memory is left for the KV cache",
                                "Raise it, or use a smaller model")
    return tokens // size * size
