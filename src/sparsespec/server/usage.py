"""Counts of one response while its outputs come in: tokens for `usage`, drafts for `speculation`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparsespec.core.outputs import RequestOutput

_DRAFT_COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


class UsageCounter:
    """Takes every output of a response, increments or final ones. count_reasoning: token ids → how many are reasoning."""

    def __init__(self, count_reasoning: Callable[[Sequence[int]], int] | None = None) -> None:
        self._count_reasoning = count_reasoning
        self._prompts: dict[str, tuple[int, int]] = {}
        self._drafts: dict[str, tuple[int, ...]] = {}
        self._tokens = 0
        self._ids: dict[tuple[str, int], list[int]] = {}

    def add(self, output: RequestOutput) -> None:
        """Count an output."""
        self._prompts[output.request_id] = (len(output.prompt_token_ids), output.num_cached_tokens)
        if output.metrics is not None:
            self._drafts[output.request_id] = tuple(getattr(output.metrics, name) for name in _DRAFT_COUNTS)
        for c in output.outputs:
            self._tokens += len(c.token_ids)
            if self._count_reasoning is not None:
                by_token = c.finish_reason == "stop" and not isinstance(c.stop_reason, str)  # the last one is no text
                self._ids.setdefault((output.request_id, c.index), []).extend(c.token_ids[:-1] if by_token else c.token_ids)

    def usage(self) -> dict[str, Any]:
        """`usage` so far."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        reasoning = sum(map(self._count_reasoning, self._ids.values())) if self._count_reasoning is not None else 0
        return {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens,
                "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
                "completion_tokens_details": {"reasoning_tokens": reasoning}}

    def speculation(self) -> dict[str, Any]:
        """Draft counts of the response."""
        drafts, drafted, accepted = (sum(d[i] for d in self._drafts.values()) for i in range(len(_DRAFT_COUNTS)))
        return {"num_drafts": drafts, "num_draft_tokens": drafted, "num_accepted_tokens": accepted,
                "acceptance_rate": accepted / drafted if drafted else 0.0, "mean_accepted": accepted / drafts if drafts else 0.0}
