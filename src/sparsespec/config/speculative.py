"""How tokens are drafted and verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsespec.config.fields import check_choices, check_range, from_dict, option
from sparsespec.core.errors import InvalidValueError

_ALIASES = {"sparse_attn_algorithm": "method"}


@dataclass(frozen=True)
class SpeculativeConfig:
    """`speculative_config` of the public API; None there means these defaults, {"method": "none"} switches it off."""

    method: str = option("pillar", "draft policy; 'none' decodes plainly")
    num_speculative_tokens: int = option(8, "k, tokens drafted between two verifications")
    sparse_attn_ratio: float = option(0.05, "s, share of the KV cache that a draft step may see")
    min_budget: int = option(128, "KV entries that a draft step sees at least, where the context has them")
    score_rows: str = option("all", "which verified rows score the KV; accepted leaves out the rows of rejected drafts",
                             choices=("all", "accepted"))
    schedule: str = option("unified", "unified mixes drafts and verifications in each batch; lockstep alternates",
                           choices=("unified", "lockstep"))
    verification: str = option("sync", "when the CPU handles a verification's result", choices=("sync", "delayed", "device"))
    kv_policy: str = option("offload", "what happens when the KV pool is full", choices=("offload", "recompute", "reserve"))
    adaptive: bool = option(True, "choose k from measured cost and acceptance, and decode plainly where drafts do not pay")
    synthetic_acceptance: float | None = option(None, "benchmarks only: accept each draft with this chance; output is not lossless")

    def __post_init__(self) -> None:
        where = "speculative_config."
        check_choices(self, where)
        check_range(where + "num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        check_range(where + "sparse_attn_ratio", self.sparse_attn_ratio, 0.0, 1.0, integer=False,
                    remedy="Give a share of the context, 0.05 for 5 %")
        check_range(where + "min_budget", self.min_budget, 1)
        if not isinstance(self.adaptive, bool):
            raise InvalidValueError(where + "adaptive", self.adaptive, "not a boolean", "Give true or false")
        if self.synthetic_acceptance is not None:
            check_range(where + "synthetic_acceptance", self.synthetic_acceptance, 0.0, 1.0, integer=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None) -> SpeculativeConfig:
        """Build from the user's mapping (None: the defaults). Unknown keys raise UnknownFieldError."""
        if values is not None and not isinstance(values, dict):
            raise InvalidValueError("speculative_config", values, "not a mapping", 'Give a dict, such as {"method": "pillar"}')
        return from_dict(cls, values or {}, "speculative_config", _ALIASES)
