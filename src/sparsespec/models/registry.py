"""Which class serves which Hugging Face model_type. A new architecture is one file and one line here."""

from __future__ import annotations

from sparsespec.core.errors import ModelLoadError
from sparsespec.models.llama import LlamaForCausalLM
from sparsespec.models.qwen2 import Qwen2ForCausalLM
from sparsespec.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


def model_class(model_type: str, where: str) -> type[LlamaForCausalLM]:
    """The class of an architecture. Raises ModelLoadError for one that is not known."""
    if model_type not in MODELS:
        raise ModelLoadError("model", where, f"architecture {model_type!r} is not supported",
                             f"Supported: {', '.join(sorted(MODELS))}")
    return MODELS[model_type]
