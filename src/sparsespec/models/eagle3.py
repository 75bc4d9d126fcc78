"""The draft head of EAGLE-3 (arXiv 2503.01840): one decoder layer over hidden states of the target.

The target's features at position p and the embedding of token p + 1 give a hidden state at position p, from which token
p + 2 is predicted; a chain feeds that state back in place of the features. The head may know a part of the target's
vocabulary only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sparsespec.config.model import ModelConfig
from sparsespec.layers.linear import Linear
from sparsespec.layers.mlp import GatedMLP
from sparsespec.layers.norm import RMSNorm
from sparsespec.layers.rope import apply_rope, frequencies
from sparsespec.models.llama import LlamaForCausalLM

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [N, heads, D], k, v [N, KV heads, D]) → [N, heads · D]: attention over the head's own KV cache, these rows included."""


class Eagle3Head(nn.Module):
    """config: the head's own. features: layers of the target whose inputs it reads, in the order of the checkpoint's `fc`.

    target_ids int64 [draft vocabulary]: each of its tokens in the target's vocabulary. own_embedding, own_output: whether the
    checkpoint brings these; else they are the target's. norm_before_residual: what `hidden_norm` gives is the residual
    too, as some training code has it.
    """

    def __init__(self, config: ModelConfig, target: LlamaForCausalLM, features: tuple[int, ...], target_ids: Tensor, *,
                 own_embedding: bool, own_output: bool, norm_before_residual: bool) -> None:
        super().__init__()
        c, dtype, device = config, target.dtype, target.device
        self.config, self.dtype, self.device, self.vocab_size = c, dtype, device, target.config.vocab_size
        self.num_kv_heads, self.head_dim, self.hidden_size = c.num_kv_heads, c.head_dim, c.hidden_size
        self.feature_layers = tuple(sorted(set(features)))  # as the target hands them out: each once, in its order
        self._order = [self.feature_layers.index(layer) for layer in features]
        self.norm_before_residual, self.target_ids = norm_before_residual, target_ids.to(device)
        self._target = (target,)  # in a tuple, as it is no part of this module

        def linear(inputs: int, outputs: int | tuple[int, ...], bias: bool = False) -> Linear:
            return Linear(inputs, outputs, bias=bias, dtype=dtype, device=device, deterministic=False)

        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.fc = linear(len(features) * target.config.hidden_size, c.hidden_size)
        self.qkv = linear(2 * c.hidden_size, (q_size, kv_size, kv_size), c.attention_bias)
        self.out = linear(q_size, c.hidden_size, c.attention_bias)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, dtype=dtype, device=device, deterministic=False)
        self.hidden_norm, self.input_norm, self.post_norm, self.norm = (
            RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=dtype, device=device) for _ in range(4))
        self.embedding = torch.empty(c.vocab_size, c.hidden_size, dtype=dtype, device=device) if own_embedding else target.embedding
        self.output = linear(c.hidden_size, len(target_ids)) if own_output else None
        self._own_embedding = own_embedding
        inverse, self._rope_scale = frequencies(c, c.max_position_embeddings)
        self._inverse_frequencies = inverse.to(device)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the head's own K and V of a token."""
        return self.config.kv_bytes_per_token(self.dtype.itemsize) // self.config.num_layers

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Patterns of tensors that checkpoints may carry and this head does not use."""
        return (r"rotary_emb\.inv_freq$",)

    def weight_targets(self) -> dict[str, Tensor]:
        """Tensor name of a public checkpoint → the view that it fills."""
        targets = {"fc.weight": self.fc.part(0), "norm.weight": self.norm.weight,
                   "midlayer.hidden_norm.weight": self.hidden_norm.weight,
                   "midlayer.input_layernorm.weight": self.input_norm.weight,
                   "midlayer.post_attention_layernorm.weight": self.post_norm.weight}
        linears = {"self_attn.q_proj": (self.qkv, 0), "self_attn.k_proj": (self.qkv, 1), "self_attn.v_proj": (self.qkv, 2),
                   "self_attn.o_proj": (self.out, 0), "mlp.gate_proj": (self.mlp.gate_up, 0),
                   "mlp.up_proj": (self.mlp.gate_up, 1), "mlp.down_proj": (self.mlp.down, 0)}
        for name, (linear, part) in linears.items():
            targets[f"midlayer.{name}.weight"] = linear.part(part)
            if linear.bias is not None:
                targets[f"midlayer.{name}.bias"] = linear.part(part, "bias")
        if self._own_embedding:
            targets["embed_tokens.weight"] = self.embedding
        if self.output is not None:
            targets["lm_head.weight"] = self.output.part(0)
        return targets

    def finalize(self) -> None:
        """Pack the weights for the CPU."""
        for linear in (self.fc, self.qkv, self.out, self.mlp.gate_up, self.mlp.down, *((self.output,) if self.output else ())):
            linear.finalize()

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden states [N, hidden] from the target's [feature_layers, N, target hidden]."""
        return self.fc(torch.cat([features[i] for i in self._order], -1))

    def forward(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The states [N, hidden] after positions [N], from the ones before and the tokens that follow them [N]."""
        rows, c = len(tokens), self.config
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        qkv = self.qkv(torch.cat((self.input_norm(self.embedding[tokens]), normed), -1)).view(rows, -1, c.head_dim)
        qk, v = qkv.split((c.num_heads + c.num_kv_heads, c.num_kv_heads), 1)
        q, k = apply_rope(qk, *self._angles(positions, qk.dtype)).split((c.num_heads, c.num_kv_heads), 1)
        x = residual + self.out(attend(q, k, v))
        return x + self.mlp(self.post_norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, target vocabulary] in float32; -inf for tokens that the head does not know."""
        normed = self.norm(hidden)
        if self.output is None:
            return self._target[0].head(normed).float()
        out = torch.full((len(hidden), self.vocab_size), -torch.inf, device=hidden.device)
        return out.index_copy_(1, self.target_ids, self.output(normed).float())

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, D], as `apply_rope` wants them; computed, as heads are run far beyond the length they declare."""
        angles = positions[:, None].float() * self._inverse_frequencies
        cos, sin = angles.cos() * self._rope_scale, angles.sin() * self._rope_scale
        return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]
