"""Which cells are measured: policy variants, k and s."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsespec.bench.lab.options import AcceptanceOptions, SweepOptions
from sparsespec.config.speculative import SpeculativeConfig
from sparsespec.core.errors import InvalidValueError
from sparsespec.spec.registry import POLICIES

PLAIN = "none"
ALL = "all"
Settings = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Cell:
    """One way to draft. policy: as the user wrote it; settings: further fields of speculative_config, as (name, value) pairs.

    k, s: None where the policy has no such thing: plain decoding neither, a policy without sparse drafts no s.
    curve: which sweep it belongs to, "k" or "s", both as "ks", or "". optional: left out where the engine refuses it.
    """

    policy: str
    method: str
    k: int | None
    s: float | None
    settings: Settings = ()
    curve: str = ""
    optional: bool = False

    @property
    def drafts(self) -> bool:
        return self.method != PLAIN

    def config(self, base: dict[str, Any]) -> dict[str, Any]:
        """speculative_config: lockstep rounds of exactly k drafts and one budget for all; `base` for what the cell leaves open."""
        if not self.drafts:
            return {"method": PLAIN}
        sparse = {} if self.s is None else {"sparse_attn_ratio": self.s}
        return {"adaptive": False, "schedule": "lockstep", "min_budget": SpeculativeConfig.min_budget, **base,
                "method": self.method, "num_speculative_tokens": self.k, **sparse, **dict(self.settings)}


BASELINE = Cell(PLAIN, PLAIN, None, None)


def make_cells(options: AcceptanceOptions | SweepOptions) -> list[Cell]:
    """The cells that the options ask for. Raises InvalidValueError for a policy that is none."""
    return _sweep(options) if isinstance(options, SweepOptions) else _matrix(options)


def _matrix(options: AcceptanceOptions) -> list[Cell]:
    """Policies x k x s."""
    cells = []
    for policy, method, settings, optional in _variants(options.policies):
        if method == PLAIN:
            cells.append(BASELINE)
        else:
            cells += [Cell(policy, method, k, s if _sparse(method) else None, settings, optional=optional)
                      for k in options.k for s in options.s]
    return list(dict.fromkeys(cells))


def _sweep(options: SweepOptions) -> list[Cell]:
    """Both curves; the point that they share is measured once."""
    points = {(k, options.at_s): "k" for k in options.sweep_k}
    for s in options.sweep_s:
        points[options.at_k, s] = points.get((options.at_k, s), "") + "s"
    variants = [v for v in _variants(options.policies) if v[1] != PLAIN]
    for policy, method, _, optional in variants:
        if not _sparse(method) and not optional:
            raise InvalidValueError("policies", policy, "drafts without sparse attention, so there is no s to sweep",
                                    "Use bench acceptance with several k")
    return [Cell(policy, method, k, s, settings, curve, optional) for policy, method, settings, optional in variants
            if _sparse(method) for (k, s), curve in points.items()]


def _sparse(method: str) -> bool:
    """Whether the policy drafts with sparse attention, so that s means something."""
    return bool(getattr(POLICIES[method], "selects", True))


def _variants(policies: Sequence[str]) -> list[tuple[str, str, Settings, bool]]:
    """(as written, method, settings, optional) of each policy. "all" stands for every policy of the registry."""
    out: list[tuple[str, str, Settings, bool]] = []
    for text in policies:
        if text == ALL:
            out += [(name, name, (), True) for name in POLICIES]
            continue
        method, _, rest = text.partition(":")
        if method not in POLICIES:
            raise InvalidValueError("policies", text, "unknown draft policy", f"Choose from: {ALL}, {', '.join(sorted(POLICIES))}")
        out.append((text, method, tuple(_setting(part, text) for part in rest.split(",") if part), False))
    return out


def _setting(part: str, text: str) -> tuple[str, Any]:
    name, equals, value = part.partition("=")
    if not name or not equals:
        raise InvalidValueError("policies", text, f"{part!r} is no setting", "Write NAME:setting=value,setting=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value  # a string without quotes
