"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from sparsespec.config.model import ModelConfig
from sparsespec.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    @staticmethod
    def biases(config: ModelConfig) -> tuple[bool, bool]:
        return True, False
