"""Log probabilities for the requests that ask for them; the others pay nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsespec.core.outputs import LogprobDict
from sparsespec.core.request import Request
from sparsespec.runner.batch import spread
from sparsespec.sampling.logprobs import gather_logprobs, processed_logprobs, raw_logprobs, to_dicts
from sparsespec.sampling.sampler import Rows, Sampler

_PROMPT_ROWS = 128  # rows whose logits are held at once


class LogprobCollector:
    """mode: raw_logprobs, of the model's logits; processed_logprobs, after penalties, temperature and truncation."""

    def __init__(self, mode: str, sampler: Sampler) -> None:
        self.processed, self.sampler = mode == "processed_logprobs", sampler
        self._prompts: dict[Request, list[LogprobDict | None]] = {}

    def emitted(self, requests: Sequence[Request | None], first: np.ndarray, chosen: np.ndarray, counts: np.ndarray,
                logits: Tensor, rows: Rows, tokens: Tensor) -> dict[int, list[LogprobDict]]:
        """For each of B requests that wants them, by its index: a dict for each of its counts[b] tokens chosen[b].

        first [B]: its first row in logits [N, V] and rows.
        """
        by_top: dict[int, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            if request is not None and request.params.logprobs is not None:
                by_top[request.params.logprobs].append(i)
        out: dict[int, list[LogprobDict]] = {}
        for top, members in by_top.items():
            sizes = counts[members].astype(np.int64)
            index = torch.from_numpy(spread(first[members], sizes)).to(logits.device)
            ids = np.concatenate([chosen[i, :counts[i]] for i in members])
            dicts = self._dicts(logits[index], torch.from_numpy(ids).to(logits.device), top,
                                Rows(rows.slots[index], rows.positions[index]), tokens)
            ends = np.cumsum(sizes)
            for i, end, size in zip(members, ends.tolist(), sizes.tolist(), strict=True):
                out[i] = dicts[end - size:end]
        return out

    def prompt(self, request: Request, slot: int, start: int, hidden: Tensor, logits: Callable[[Tensor], Tensor],
               tokens: Tensor) -> None:
        """Score the tokens of the prompt in `slot` that follow rows of hidden states [n, hidden] at positions from `start` on."""
        count, top = request.params.prompt_logprobs, len(request.prompt_token_ids)
        if count is None:
            return
        found = self._prompts.setdefault(request, [None] * top)
        for low in range(0, min(len(hidden), top - 1 - start), _PROMPT_ROWS):
            high = min(low + _PROMPT_ROWS, len(hidden), top - 1 - start)
            places = torch.arange(start + low + 1, start + high + 1, device=hidden.device)
            rows = Rows(torch.full_like(places, slot), places)
            found[start + low + 1:start + high + 1] = self._dicts(logits(hidden[low:high]), tokens[slot, places], count,
                                                                  rows, tokens)

    def take_prompt(self, request: Request) -> list[LogprobDict | None] | None:
        """The prompt's log probabilities, None for its first token; None if they were not asked for."""
        return self._prompts.pop(request, None)

    def _dicts(self, logits: Tensor, ids: Tensor, top: int, rows: Rows, tokens: Tensor) -> list[LogprobDict]:
        values = processed_logprobs(logits, rows, self.sampler, tokens) if self.processed else raw_logprobs(logits)
        return to_dicts(ids, *gather_logprobs(values, ids, top))
