"""How tokens are drafted and verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsespec.config.fields import check_choices, check_range, from_dict, option
from sparsespec.core.errors import InvalidValueError

PER_REQUEST = frozenset({
    "method", "num_speculative_tokens", "sparse_attn_ratio", "min_budget", "sparse_attn_mass", "shared_budget", "score_rows",
    "score_group", "score_spread", "num_sink_tokens", "magicdec_variant", "prompt_lookup_min", "prompt_lookup_max",
    "num_proposed_tokens"})
"""What a request may set for itself."""

# What each method's authors ran it with, where it differs from the defaults.
_PRESETS: dict[str, dict[str, Any]] = {
    "specattn": {"sparse_attn_ratio": 0.07, "min_budget": 256},
    "ngram": {"num_speculative_tokens": 4},
    "eagle3": {"num_speculative_tokens": 3},
    "triforce": {"num_speculative_tokens": 6, "num_proposed_tokens": 1},
    "magicdec": {"num_sink_tokens": 32},
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """`speculative_config` of the public API; None there means these defaults, {"method": "none"} switches it off."""

    method: str = option("pillar", "draft policy; 'none' decodes plainly")
    num_speculative_tokens: int = option(8, "k, tokens drafted between two verifications")
    sparse_attn_ratio: float = option(0.05, "s, share of the KV cache that a draft step may see")
    min_budget: int = option(128, "KV entries that a draft step sees at least, where the context has them")
    sparse_attn_mass: float | None = option(None, "share of the attention that a draft step's entries hold; sparse_attn_ratio and "
                                                  "min_budget then only cap their number")
    shared_budget: bool = option(False, "layers and KV heads share one budget: the many that one looks at are taken from others")
    score_rows: str = option("all", "which verified rows score the KV; accepted leaves out the rows of rejected drafts, ends takes "
                                    "the first and the last", choices=("all", "accepted", "ends"))
    score_group: str = option("mean", "how the scores of a KV head's query heads combine", choices=("mean", "max"))
    score_spread: int = option(8, "positions that a score spreads to the right: drafts look past what verification looked at")
    num_sink_tokens: int = option(4, "first tokens that window and magicdec always see")
    magicdec_variant: str = option("stream", "stream: sinks and recent tokens; snapkv: chosen once, at the prompt's end",
                                   choices=("stream", "snapkv"))
    prompt_lookup_min: int = option(1, "n-gram drafts: shortest suffix that has to match")
    prompt_lookup_max: int = option(7, "n-gram drafts: longest suffix that is looked for")
    proposer: str = option("ngram", "hierarchy: what proposes tokens to the sparse pass", choices=("ngram", "eagle3"))
    num_proposed_tokens: int = option(4, "hierarchy: tokens that one sparse pass checks at most")
    model: str | None = option(None, "eagle3: directory or hub name of the draft head")
    draft_cost: float | None = option(None, "cost of a draft pass relative to a verification; given, a draft ends once the "
                                            "calibrated chance of one more accepted token is not worth it")
    schedule: str = option("unified", "unified mixes drafts and verifications in each batch; lockstep alternates",
                           choices=("unified", "lockstep"))
    verification: str = option("sync", "when the CPU handles a verification's result: sync before the next step, delayed during "
                                      "the next step, which the request sits out, device during the next step, with it in it",
                              choices=("sync", "delayed", "device"))
    kv_policy: str = option("offload", "what happens when the KV pool is full", choices=("offload", "recompute", "reserve"))
    adaptive: bool = option(True, "choose k from measured cost and acceptance, and decode plainly where drafts do not pay")
    synthetic_acceptance: float | None = option(None, "benchmarks only: accept each draft with this chance; output is not lossless")

    def __post_init__(self) -> None:
        where = "speculative_config."
        check_choices(self, where)
        if not isinstance(self.method, str):
            raise InvalidValueError(where + "method", self.method, "not a name", 'Give a draft policy, such as "pillar"')
        if self.model is not None and not isinstance(self.model, str):
            raise InvalidValueError(where + "model", self.model, "not a name", "Give a directory or hub name as a string")
        check_range(where + "num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        check_range(where + "sparse_attn_ratio", self.sparse_attn_ratio, 0.0, 1.0, integer=False,
                    remedy="Give a share of the context, 0.05 for 5 %")
        check_range(where + "min_budget", self.min_budget, 1)
        if self.sparse_attn_mass is not None:
            check_range(where + "sparse_attn_mass", self.sparse_attn_mass, 0.0, 1.0, integer=False)
        if self.draft_cost is not None:
            check_range(where + "draft_cost", self.draft_cost, 0.0, 10.0, integer=False)
        check_range(where + "score_spread", self.score_spread, 0, 64)
        check_range(where + "num_sink_tokens", self.num_sink_tokens, 0)
        check_range(where + "prompt_lookup_min", self.prompt_lookup_min, 1)
        check_range(where + "prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min,
                    remedy="Give at least prompt_lookup_min")
        check_range(where + "num_proposed_tokens", self.num_proposed_tokens, 1)
        if not isinstance(self.adaptive, bool):
            raise InvalidValueError(where + "adaptive", self.adaptive, "not a boolean", "Give true or false")
        if self.synthetic_acceptance is not None:
            check_range(where + "synthetic_acceptance", self.synthetic_acceptance, 0.0, 1.0, integer=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None) -> SpeculativeConfig:
        """Build from the user's mapping (None: the defaults). Unknown keys raise UnknownFieldError."""
        if values is not None and not isinstance(values, dict):
            raise InvalidValueError("speculative_config", values, "not a mapping", 'Give a dict, such as {"method": "pillar"}')
        values = plain_names(values or {})
        method = values.get("method")
        preset = _PRESETS.get(method, {}) if isinstance(method, str) else {}
        return from_dict(cls, {**preset, **values}, "speculative_config")


def plain_names(values: dict[str, Any]) -> dict[str, Any]:
    """vLLM's proposal names sparse self-speculation `sparse_attn`, and what selects `sparse_attn_algorithm`: the same settings
    without these names. Raises InvalidValueError where they contradict."""
    values = dict(values)
    algorithm, on = values.pop("sparse_attn_algorithm", None), values.pop("sparse_attn", None)
    where = "speculative_config."
    if on is not None and not isinstance(on, bool):
        raise InvalidValueError(where + "sparse_attn", on, "not a boolean", "Give true, or name a method")
    if values.get("method") == "sparse_attn":
        del values["method"]
        on = True if on is None else on
    if on is False and (algorithm is not None or "method" not in values):
        raise InvalidValueError(where + "sparse_attn", on, "switches off what drafts", 'Set method="none", or name another method')
    if on and algorithm is None:
        algorithm = "specattn"
    if algorithm is not None and values.setdefault("method", algorithm) != algorithm:
        raise InvalidValueError(where + "method", values["method"], f"contradicts sparse_attn with {algorithm!r}",
                                "Give one of the two")
    return values
