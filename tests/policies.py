"""The draft policies as tests run them: configurations that draft with small views, and a model that they share."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from sparsespec.config.engine import LoadConfig
from sparsespec.loader import load_model
from sparsespec.loader.loaded import LoadedModel
from sparsespec.testing import tiny_eagle3, tiny_llama

TARGET = tiny_llama(5, num_layers=4)  # quest sees everything in the first two layers

POLICIES: dict[str, dict[str, Any]] = {
    "pillar": {"method": "pillar"},
    "pillar-mass": {"method": "pillar", "sparse_attn_mass": 0.6, "min_budget": 24},
    "pillar-accepted": {"method": "pillar", "score_rows": "accepted", "score_group": "max"},
    "pillar-ends": {"method": "pillar", "score_rows": "ends", "score_group": "max"},
    "specattn": {"method": "specattn"},
    "specattn-mass": {"method": "specattn", "sparse_attn_mass": 0.6, "min_budget": 24},
    "window": {"method": "window"},
    "magicdec": {"method": "magicdec", "num_sink_tokens": 4},
    "magicdec-snapkv": {"method": "magicdec", "magicdec_variant": "snapkv", "min_budget": 36},
    "quest": {"method": "quest"},
    "oracle": {"method": "oracle"},
    "ngram": {"method": "ngram"},
    "eagle3": {"method": "eagle3"},
    "hierarchy": {"method": "hierarchy"},
    "hierarchy-eagle3": {"method": "hierarchy", "proposer": "eagle3", "num_proposed_tokens": 2},
    "triforce": {"method": "triforce"},
}
"""By name, settings that differ from `configure`'s."""


def needs_head(name: str) -> bool:
    """Whether the policy drafts with a head."""
    return "eagle3" in name


def configure(name: str, k: int, head: Path | None = None, **settings: Any) -> dict[str, Any]:
    """A speculative_config that always drafts, k tokens a round; head: of policies that need one."""
    config: dict[str, Any] = {"num_speculative_tokens": k, "sparse_attn_ratio": 0.0, "min_budget": 8, "adaptive": False}
    config |= POLICIES[name] | settings
    if needs_head(name):
        config["model"] = str(head or tiny_eagle3(TARGET, 1))
    return config


def per_request(name: str, k: int) -> dict[str, Any]:
    """The part of `configure` that a request may ask for, of an engine whose proposer is given."""
    return {key: v for key, v in configure(name, k).items() if key not in ("adaptive", "model", "proposer")}


@cache
def target() -> LoadedModel:
    """The model, on the CPU."""
    return load_model(LoadConfig(model=str(TARGET), skip_tokenizer_init=True, device="cpu"))
