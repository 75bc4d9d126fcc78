"""The draft policies by name, and those that one engine has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from sparsespec.config.model import ModelConfig
from sparsespec.config.speculative import PER_REQUEST, SpeculativeConfig, plain_names
from sparsespec.core.errors import InvalidValueError, UnknownFieldError
from sparsespec.core.request import DraftTraits
from sparsespec.spec.base import DraftHead, DraftPolicy
from sparsespec.spec.eagle3 import Eagle3
from sparsespec.spec.hierarchy import Hierarchy
from sparsespec.spec.magicdec import MagicDec
from sparsespec.spec.ngram import NGram
from sparsespec.spec.none import NoDraft
from sparsespec.spec.oracle import Oracle
from sparsespec.spec.pillar import Pillar
from sparsespec.spec.quest import Quest
from sparsespec.spec.specattn import SpecAttn
from sparsespec.spec.window import Window

_KEPT = 64  # policies that are kept for requests to come, though no request uses them now

Factory = Callable[[SpeculativeConfig, ModelConfig], DraftPolicy]


def _hierarchy(config: SpeculativeConfig, model: ModelConfig) -> DraftPolicy:
    return Hierarchy(config, model, Pillar, {"ngram": NGram, "eagle3": Eagle3}[config.proposer])


def _triforce(config: SpeculativeConfig, model: ModelConfig) -> DraftPolicy:
    return Hierarchy(config, model, Window, NGram)


POLICIES: dict[str, Factory] = {
    "none": NoDraft, "pillar": Pillar, "specattn": SpecAttn, "window": Window, "magicdec": MagicDec, "quest": Quest,
    "oracle": Oracle, "ngram": NGram, "eagle3": Eagle3, "hierarchy": _hierarchy, "triforce": _triforce,
}


def register(name: str, factory: Factory) -> None:
    """Make a policy of one's own selectable as speculative_config.method. Raises InvalidValueError if the name is taken."""
    if name in POLICIES:
        raise InvalidValueError("name", name, "already a draft policy", "Choose another")
    POLICIES[name] = factory


def make_policy(config: SpeculativeConfig, model: ModelConfig) -> DraftPolicy:
    """The policy that the configuration names. Raises InvalidValueError for an unknown one."""
    if config.method not in POLICIES:
        raise InvalidValueError("speculative_config.method", config.method, "unknown draft policy",
                                f"Choose from: {', '.join(sorted(POLICIES))}")
    return POLICIES[config.method](config, model)


class PolicySet:
    """The engine's own policy, number 0, and those that requests asked for.

    A policy keeps its number while requests use it (`hold`, `release`); the number of one that nobody uses goes to another
    policy once there are more than 64, the longest unused first.
    """

    def __init__(self, config: SpeculativeConfig, model: ModelConfig) -> None:
        self.model = model
        self._configs = [config]
        self.policies = [make_policy(config, model)]
        self._head: DraftHead | None = None
        self._users = [1]  # requests by policy; the engine uses its own for ever
        self._idle: dict[int, None] = {}  # numbers that no request uses, the longest unused first

    def hold(self, index: int) -> None:
        """A request that uses policy `index` is in the engine from now on."""
        self._users[index] += 1
        self._idle.pop(index, None)

    def release(self, index: int) -> None:
        """It has left."""
        self._users[index] -= 1
        if not self._users[index]:
            self._idle[index] = None

    def bind(self, head: DraftHead) -> None:
        """Give the engine's draft head to its policy, and to those that requests will ask for."""
        self._head = head
        self.policies[0].bind(head)

    def __getitem__(self, index: int) -> DraftPolicy:
        return self.policies[index]

    def __len__(self) -> int:
        return len(self.policies)

    @property
    def reselects(self) -> bool:
        """Whether any policy selects anew at each draft step."""
        return any(p.reselects for p in self.policies)

    def traits(self, asked: dict[str, Any] | None) -> DraftTraits:
        """Traits of the policy of a request that asks for these settings over the engine's. Raises InvalidValueError."""
        if not asked:
            return self.policies[0].traits(0)
        own, asked = self._configs[0], plain_names(asked)
        for key, value in asked.items():
            if key not in PER_REQUEST:
                known = key in {f.name for f in fields(own)}
                raise UnknownFieldError(f"speculative_config.{key}", value,
                                        "fixed when the engine starts" if known else "unknown",
                                        f"A request may set: {', '.join(sorted(PER_REQUEST))}")
        if asked.get("method", own.method) == own.method:
            config = replace(own, **asked)
        else:
            config = SpeculativeConfig.from_dict(asked)
            shared = {f.name: getattr(own, f.name) for f in fields(own) if f.name not in PER_REQUEST}
            if "num_speculative_tokens" not in asked:
                shared["num_speculative_tokens"] = min(config.num_speculative_tokens, own.num_speculative_tokens)
            config = replace(config, **shared)
        index = self._find(config)
        return self.policies[index].traits(index)

    def _find(self, config: SpeculativeConfig) -> int:
        if config in self._configs:
            return self._configs.index(config)
        policy = make_policy(config, self.model)
        if policy.drafts and not self.policies[0].drafts:
            raise InvalidValueError("speculative_config.method", config.method, "the engine was started without speculation",
                                    "Start it with a policy, and ask for \"none\" where a request should decode plainly")
        if policy.drafts and config.num_speculative_tokens > self._configs[0].num_speculative_tokens:
            raise InvalidValueError("speculative_config.num_speculative_tokens", config.num_speculative_tokens,
                                    f"more than the engine's {self._configs[0].num_speculative_tokens}",
                                    "Ask for less, or start the engine with more")
        if policy.needs_head:
            if self._head is None:
                raise InvalidValueError("speculative_config.method", config.method, "the engine was started without a draft head",
                                        f"Start it with method={config.method!r} and model=...")
            policy.bind(self._head)
        if len(self._idle) >= _KEPT:
            index = next(iter(self._idle))
            self._configs[index], self.policies[index] = config, policy
        else:
            index = len(self.policies)
            self._configs.append(config)
            self.policies.append(policy)
            self._users.append(0)
        self._idle[index] = self._idle.pop(index, None)
        return index
