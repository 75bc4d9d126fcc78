"""Doors into a running engine that tests need and callers do not: forced drafts, forced preemption, single steps, pages.

All take an `LLM` or an `Engine`. Counters come from `LLM.stats()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from sparsespec.core.errors import InvalidValueError
from sparsespec.core.outputs import RequestOutput
from sparsespec.core.request import Request
from sparsespec.engine.engine import Engine
from sparsespec.llm import LLM

DraftOverride = Callable[[str, int], int | None]
"""(request id, position) → the token to draft there, or None for the policy's own."""


@dataclass(frozen=True)
class PageCounts:
    """Pages of the KV pools."""

    device_total: int
    device_free: int
    host_total: int
    host_free: int


def _engine(llm: LLM | Engine) -> Engine:
    return llm.engine if isinstance(llm, LLM) else llm


@contextmanager
def override_drafts(llm: LLM | Engine, override: DraftOverride) -> Iterator[None]:
    """While open, drafts are what `override` says. A position is an index in the request's sequence, prompt included.

    It holds for every request: under rejection sampling an overridden draft counts as a proposal that was certain.
    """
    proposals = _engine(llm).runner.proposals
    before, proposals.override = proposals.override, override
    try:
        yield
    finally:
        proposals.override = before


def step(llm: LLM | Engine) -> list[RequestOutput]:
    """One iteration: schedule, execute, commit. Gives the outputs of requests that ended or, if streamed, grew."""
    return _engine(llm).step()


def running_requests(llm: LLM | Engine) -> dict[str, Request]:
    """The requests that hold a slot now, by id (the n completions of one prompt are called id#0, id#1, ...)."""
    return {r.request_id: r for r in _engine(llm).scheduler.requests if r is not None}


def force_preemption(llm: LLM | Engine, request_id: str) -> None:
    """Take a running request off the device between two steps; it returns to the head of the queue and loses no token.

    Raises InvalidValueError if it is not running.
    """
    request = running_requests(llm).get(request_id)
    if request is None:
        raise InvalidValueError("request_id", request_id, "not running", "Step the engine until it is")
    _engine(llm).scheduler.preempt(request)


def page_counts(llm: LLM | Engine) -> PageCounts:
    """Pages on the device and on the host, all and free."""
    s = _engine(llm).stats()
    return PageCounts(s["device_pages_total"], s["device_pages_free"], s["host_pages_total"], s["host_pages_free"])


def poison_free_pages(llm: LLM | Engine) -> int:
    """Fill every page that nobody owns with NaN, which spreads to any result that reads one. Gives how many there were."""
    engine = _engine(llm)
    free = np.flatnonzero(engine.pages.allocator.refs == 0)
    size = engine.pages.page_size
    entries = (free[:, None] * size + np.arange(size)).reshape(-1)
    engine.pool.data[:, :, :, torch.from_numpy(entries).to(engine.pool.device)] = torch.nan
    return len(free)
