"""Qwen3 (dense): Llama with RMS norms on each head's q and k."""

from __future__ import annotations

from sparsespec.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    qk_norm = True
