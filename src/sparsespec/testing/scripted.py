"""A target whose next token is written down beforehand, so that what is accepted is known exactly.

    loaded = scripted(lambda token, position: (token + 1) % 100, vocab_size=100)
    llm = LLM(loaded, speculative_config={"num_speculative_tokens": 4, "adaptive": False})

Underneath runs a small random model, so that KV is written, attention computed and entries selected as for any other;
only its logits are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsespec.config.model import ModelConfig
from sparsespec.layers.rope import RotaryEmbedding
from sparsespec.loader.dummy import fill_random
from sparsespec.loader.loaded import LoadedModel
from sparsespec.models.llama import Attend, LlamaForCausalLM

Wanted = int | tuple[int, ...] | None
"""A token; several, which tie bitwise at the top; or None for a row of NaN."""

Script = Callable[[int, int], Wanted] | Sequence[Wanted]
"""(last token, position of the wanted one) → the wanted one; or a sequence of them by position."""

_HIDDEN = 32


class ScriptedTarget(LlamaForCausalLM):
    """Logits [N, vocab] are `gap` for what the script wants and 0 elsewhere; hidden states carry token and position."""

    def __init__(self, script: Script, vocab_size: int, gap: float, max_position_embeddings: int, eos: tuple[int, ...]) -> None:
        config = ModelConfig("llama", vocab_size, _HIDDEN, _HIDDEN, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
                             rope={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=True,
                             max_position_embeddings=max_position_embeddings, eos_token_ids=eos)
        super().__init__(config, dtype=torch.float32, device=torch.device("cpu"))
        fill_random(self.weight_targets(), 0, self.device)
        self.script, self.gap = script, gap

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, rotary: RotaryEmbedding,
                capture: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        hidden, captured = super().forward(token_ids, positions, attend, rotary, capture)
        hidden[:, 0], hidden[:, 1] = token_ids.float(), positions.float()  # exact below 2**24
        return hidden, captured

    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.zeros(len(hidden), self.config.vocab_size)
        tokens = hidden[:, 0].round().long().clamp(0, self.config.vocab_size - 1).tolist()
        positions = hidden[:, 1].round().long().clamp(0).tolist()
        for row, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            wanted = self._wanted(token, position + 1)
            if wanted is None:
                out[row] = torch.nan
            else:
                out[row, list(wanted) if isinstance(wanted, tuple) else wanted] = self.gap
        return out

    def _wanted(self, token: int, position: int) -> Wanted:
        if callable(self.script):
            return self.script(token, position)
        return self.script[position] if position < len(self.script) else self.script[-1]


def scripted(script: Script, vocab_size: int = 256, *, gap: float = 50.0, tokenizer: Any | None = None,
             eos_token_ids: Sequence[int] = (), max_position_embeddings: int = 2048) -> LoadedModel:
    """A scripted model, to be given to LLM. gap: how far the wanted token's logit lies above all others.

    script: see Script; a sequence that is too short goes on with its last entry. tokenizer: any transformers tokenizer
    whose ids lie in the vocabulary.
    """
    eos = tuple(eos_token_ids)
    model = ScriptedTarget(script, vocab_size, gap, max_position_embeddings, eos)
    return LoadedModel(model, model.config, tokenizer, "scripted", model.dtype, model.device, eos)
