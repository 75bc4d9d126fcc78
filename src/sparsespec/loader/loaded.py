"""What loading gives: the model ready to run, with its configuration and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparsespec.config.model import ModelConfig

if TYPE_CHECKING:
    from sparsespec.models.llama import LlamaForCausalLM


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model. Engines may share one, as nothing here changes after loading.

    tokenizer: a transformers PreTrainedTokenizerBase, or None under skip_tokenizer_init or dummy weights without one.
    name: as the user gave it. eos_token_ids: those of the config, of generation_config.json and of the tokenizer.
    """

    model: LlamaForCausalLM
    config: ModelConfig
    tokenizer: Any | None
    name: str
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]
