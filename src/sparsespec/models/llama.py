"""Llama, and the skeleton that its relatives vary: what differs between them is a class attribute or one method.

A model maps (token ids, positions) to hidden states; attention and the KV cache are behind `AttentionBackend`, so a
model does not know whether a row is prefill, draft or verification.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from sparsespec.config.model import ModelConfig
from sparsespec.core.errors import ModelLoadError
from sparsespec.layers.linear import Linear, tied_head
from sparsespec.layers.mlp import GatedMLP
from sparsespec.layers.norm import RMSNorm
from sparsespec.layers.rope import RotaryEmbedding, apply_rope


class Attend(Protocol):
    """What a layer needs of the attention backend."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [N, KV heads, D] of the rows, and attend with q [N, heads, D]; gives [N, heads · D]."""
        ...


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, config: ModelConfig, *, qkv_bias: bool, out_bias: bool, qk_norm: bool, dtype: torch.dtype,
                 device: torch.device, deterministic: bool) -> None:
        super().__init__()
        c = config
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.qkv = Linear(c.hidden_size, (q_size, kv_size, kv_size), bias=qkv_bias, dtype=dtype, device=device,
                          deterministic=deterministic)
        self.out = Linear(q_size, c.hidden_size, bias=out_bias, dtype=dtype, device=device, deterministic=deterministic)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, dtype=dtype, device=device,
                            deterministic=deterministic)
        self.input_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype, device=device)
        self.post_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype, device=device)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype=dtype, device=device) if qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype=dtype, device=device) if qk_norm else None

    def forward(self, index: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        rows = x.shape[0]
        qkv = self.qkv(self.input_norm(x)).view(rows, self.heads + 2 * self.kv_heads, self.head_dim)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((self.heads, self.kv_heads), 1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        q, k = apply_rope(qk, cos, sin).split((self.heads, self.kv_heads), 1)
        x = x + self.out(attend.run(index, q, k, v))
        return x + self.mlp(self.post_norm(x))


class LlamaForCausalLM(nn.Module):
    """Decoder with an output head. Weights are allocated unset; the loader fills `weight_targets()`."""

    qk_norm: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, deterministic: bool = False) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ModelLoadError("hidden_act", config.hidden_act, "not supported", "Use a model with silu")
        self.config, self.dtype, self.device = config, dtype, device
        self.version, self.complete = 0, True  # of the weights: how often they were replaced, and whether all are there
        qkv_bias, out_bias = self.biases(config)
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(config, qkv_bias=qkv_bias, out_bias=out_bias, qk_norm=self.qk_norm, dtype=dtype, device=device,
                         deterministic=deterministic) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.head = tied_head(self.embedding, deterministic) if config.tie_word_embeddings else Linear(
            config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device, deterministic=deterministic)

    @staticmethod
    def biases(config: ModelConfig) -> tuple[bool, bool]:
        """Whether q, k, v and the attention's output have a bias."""
        return config.attention_bias, config.attention_bias

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Patterns of tensors that checkpoints may carry and this model does not use."""
        return (r"rotary_emb\.inv_freq$", *((r"^lm_head\.weight$",) if self.config.tie_word_embeddings else ()))

    def weight_targets(self) -> dict[str, Tensor]:
        """Hugging Face tensor name → the view that it fills."""
        targets = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tie_word_embeddings:
            targets["lm_head.weight"] = self.head.part(0)
        for i, layer in enumerate(self.layers):
            prefix = f"model.layers.{i}."
            linears = {"self_attn.q_proj": (layer.qkv, 0), "self_attn.k_proj": (layer.qkv, 1),
                       "self_attn.v_proj": (layer.qkv, 2), "self_attn.o_proj": (layer.out, 0),
                       "mlp.gate_proj": (layer.mlp.gate_up, 0), "mlp.up_proj": (layer.mlp.gate_up, 1),
                       "mlp.down_proj": (layer.mlp.down, 0)}
            for name, (linear, part) in linears.items():
                targets[f"{prefix}{name}.weight"] = linear.part(part)
                if linear.bias is not None:
                    targets[f"{prefix}{name}.bias"] = linear.part(part, "bias")
            targets[prefix + "input_layernorm.weight"] = layer.input_norm.weight
            targets[prefix + "post_attention_layernorm.weight"] = layer.post_norm.weight
            for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
                if norm is not None:
                    targets[f"{prefix}self_attn.{name}.weight"] = norm.weight
        return targets

    def finalize(self) -> None:
        """Pack the weights, a layer at a time so that the peak stays near one copy."""
        self.head.finalize(keep=self.config.tie_word_embeddings)
        for linear in self._linears():
            linear.finalize()

    def reopen(self) -> None:
        """Undo `finalize`, so that new weights can be loaded."""
        self.head.reopen()
        for linear in self._linears():
            linear.reopen()

    def _linears(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down)

    def rotary(self, max_len: int) -> RotaryEmbedding:
        """Rotary tables for sequences up to max_len. An engine keeps its own: for some kinds they depend on max_len."""
        return RotaryEmbedding(self.config, max_len, self.device)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, rotary: RotaryEmbedding,
                capture: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """(hidden states [N, hidden] before the final norm, the inputs of layers `capture` [len(capture), N, hidden]), for rows
        of token ids and positions [N]."""
        x = self.embedding[token_ids]
        cos, sin = rotary.tables(positions, x.dtype)
        captured = []
        for i, layer in enumerate(self.layers):
            if i in capture:
                captured.append(x)
            x = layer(i, x, cos, sin, attend)
        return x, torch.stack(captured) if captured else x.new_empty(0)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] in float32 for hidden states [N, hidden]."""
        out: Tensor = self.head(self.norm(hidden))
        return out.float()
