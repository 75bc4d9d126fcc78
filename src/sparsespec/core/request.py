"""A request while it is in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparsespec.core.outputs import RequestMetrics
from sparsespec.core.sampling_params import SamplingParams


@dataclass(frozen=True)
class DraftTraits:
    """How a request drafts, as far as the scheduler has to know. policy: index among the engine's policies. k: most drafts a round.

    selects: drafts with sparse attention, from a selection that a full pass leaves. proposes: tokens come from a cheap
    proposer, to be checked by the sparse pass, or by the full one where nothing selects. prompt_rows: last rows of a prompt
    that are computed even where their KV is known, as the policy looks at them.
    """

    policy: int = 0
    k: int = 0
    selects: bool = False
    proposes: bool = False
    prompt_rows: int = 1


@dataclass(eq=False)
class Request:
    """One completion of one prompt. `seed` is resolved; `coupled`: the user gave it, so text must not depend on drafts.

    limit: most tokens of prompt and output together. stop_ids: EOS and stop ids that end it. constraint: its compiled
    grammar (sampling.grammar.Constraint). slot: its row in the tables while it runs or is swapped, else -1. cache_salt:
    prefixes are shared among requests with the same one. chain: digests of its full pages, as far as the prefix cache needed
    them. num_cached_tokens: tokens whose KV was found when it started.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    coupled: bool
    limit: int
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    bad_word_ids: list[list[int]] = field(default_factory=list)
    constraint: Any | None = None
    output_token_ids: list[int] = field(default_factory=list)
    traits: DraftTraits = DraftTraits()
    slot: int = -1
    cache_salt: str | None = None
    chain: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def num_tokens(self) -> int:
        """Committed tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)
