"""The shape of a model, read from a Hugging Face config. Only here are unknown keys tolerated: configs carry many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparsespec.core.errors import ModelLoadError


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in elements. `rope` is the merged RoPE description (`rope_type`, `rope_theta`, and the kind's own keys)."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: dict[str, Any] = field(default_factory=dict)
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def weights_a_pass(self) -> int:
        """Weights that a forward pass reads: those of the layers and of the output head."""
        heads = self.num_heads + 2 * self.num_kv_heads + self.num_heads
        layer = self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token holds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str) -> ModelConfig:
        """Read a config.json mapping. `where` names the file in errors. Raises ModelLoadError for what is missing or unusable."""

        def need(key: str) -> Any:
            if hf.get(key) is None:
                raise ModelLoadError("model", where, f"its config has no {key!r}", "Point to a complete Hugging Face model")
            return hf[key]

        heads = need("num_attention_heads")
        kv_heads = hf.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ModelLoadError("model", where, f"{heads} query heads do not divide into {kv_heads} KV heads",
                                 "Check the config")
        if hf.get("use_sliding_window") and hf.get("sliding_window"):
            raise ModelLoadError("model", where, "it trains with sliding-window attention, which is not supported",
                                 "Use a model with full attention")
        rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
        rope.setdefault("rope_theta", hf.get("rope_theta") or 10000.0)
        eos = hf.get("eos_token_id")
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        return cls(
            model_type=need("model_type"), vocab_size=need("vocab_size"), hidden_size=need("hidden_size"),
            intermediate_size=need("intermediate_size"), num_layers=need("num_hidden_layers"), num_heads=heads,
            num_kv_heads=kv_heads, head_dim=hf.get("head_dim") or need("hidden_size") // heads,
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6), rope=rope,
            max_position_embeddings=hf.get("max_position_embeddings") or 2048,
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            attention_bias=bool(hf.get("attention_bias", False)), mlp_bias=bool(hf.get("mlp_bias", False)),
            hidden_act=hf.get("hidden_act", "silu"), eos_token_ids=eos_ids, bos_token_id=hf.get("bos_token_id"),
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
        )
