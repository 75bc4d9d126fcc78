"""Prompts computed once and given to many requests, so that a benchmark times decoding alone.

    cache = PromptCache(loaded)
    requests = cache.seat(llm, prompts, params)     # running, each with its prompt's KV in its own pages
    while ...: llm.engine.step()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparsespec.core.errors import CapacityError
from sparsespec.core.request import Request
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.llm import LLM

if TYPE_CHECKING:
    from sparsespec.engine.engine import Engine
    from sparsespec.loader.loaded import LoadedModel

_SPARE = 64  # tokens of room beside a prompt while it is computed


class PromptCache:
    """KV of whole prompts, by their ids. settings: further keyword arguments of LLM, such as dtype."""

    def __init__(self, loaded: LoadedModel, **settings: Any) -> None:
        self.loaded, self.settings = loaded, settings
        self._kv: dict[tuple[int, ...], Tensor] = {}

    def clear(self) -> None:
        """Forget every prompt."""
        self._kv.clear()

    def kv(self, ids: Sequence[int]) -> Tensor:
        """KV [layers, 2, KV heads, len(ids), head_dim] of a prompt; computed by plain prefill when it is new."""
        key = tuple(ids)
        if key not in self._kv:
            llm = LLM(self.loaded, speculative_config={"method": "none"}, **{
                **self.settings, "max_num_seqs": 1, "kv_cache_tokens": len(ids) + _SPARE, "max_num_batched_tokens": None})
            params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
            llm.engine.add_request("prompt", {"prompt_token_ids": list(ids)}, params)
            while llm.engine.scheduler.computed[0] < len(ids):
                llm.engine.step()
            self._kv[key] = llm.engine.pool.data[:, :, :, _entries(llm.engine, 0, len(ids))].clone()
        return self._kv[key]

    def seat(self, llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams],
             recompute: int = 1) -> list[Request]:
        """Start one request a prompt with its KV in place, but for the last `recompute` tokens, which the engine computes.

        A policy that learns from the prompt's last rows needs those recomputed. Raises CapacityError unless all run at once.
        """
        engine, every = llm.engine, [params] * len(prompts) if isinstance(params, SamplingParams) else params
        stored = [self.kv(ids) for ids in prompts]
        for index, (ids, p) in enumerate(zip(prompts, every, strict=True)):
            engine.add_request(str(index), {"prompt_token_ids": list(ids)}, p)
        engine.settle()
        engine.scheduler.schedule()  # seats everybody; the plan itself is dropped
        requests = sorted((r for r in engine.scheduler.requests if r is not None), key=lambda r: int(r.request_id))
        if len(requests) != len(prompts):
            raise CapacityError("kv_cache_tokens", engine.pages.capacity, f"{len(requests)} of {len(prompts)} prompts fit at once",
                                "Raise it, and max_num_seqs, or leave both out")
        for request, kv in zip(requests, stored, strict=True):
            length = kv.shape[3]
            engine.pool.data[:, :, :, _entries(engine, request.slot, length)] = kv
            engine.scheduler.computed[request.slot] = max(0, length - recompute)
        return requests


def _entries(engine: Engine, slot: int, length: int) -> Tensor:
    entries = engine.pages.positions_to_entries(slot, np.arange(length))
    return torch.from_numpy(entries).to(engine.pool.device)
