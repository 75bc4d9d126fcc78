"""The draft policies by name."""

from __future__ import annotations

from sparsespec.config.model import ModelConfig
from sparsespec.config.speculative import SpeculativeConfig
from sparsespec.core.errors import InvalidValueError
from sparsespec.spec.base import DraftPolicy
from sparsespec.spec.none import NoDraft
from sparsespec.spec.pillar import Pillar

POLICIES: dict[str, type[DraftPolicy]] = {p.name: p for p in (NoDraft, Pillar)}


def make_policy(config: SpeculativeConfig, model: ModelConfig) -> DraftPolicy:
    """The policy that the configuration names. Raises InvalidValueError for an unknown one."""
    if config.method not in POLICIES:
        raise InvalidValueError("speculative_config.method", config.method, "unknown draft policy",
                                f"Choose from: {', '.join(sorted(POLICIES))}")
    return POLICIES[config.method](config, model)
