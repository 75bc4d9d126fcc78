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
    """The requests that run on the device now, by id (the n completions of one prompt are called id#0, id#1, ...).

    Steps under way are waited for; their outputs come with the next step.
    """
    _engine(llm).settle()
    scheduler = _engine(llm).scheduler
    running = (scheduler.requests[slot] for slot in scheduler.movable())
    return {r.request_id: r for r in running if r is not None}


def force_preemption(llm: LLM | Engine, request_id: str) -> None:
    """Take a running request off the device between two steps, as `kv_policy` does it; it loses no token.

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
    """Fill every page that nobody holds with NaN, on both pools; it spreads to any result that reads one. Gives how many."""
    engine = _engine(llm)
    memory = engine.scheduler.memory
    free = np.flatnonzero(memory.pages.allocator.refs == 0)
    engine.pool.planes(memory.pages.page_size)[:, torch.from_numpy(free).to(engine.pool.device)] = torch.nan
    free_host = np.flatnonzero(memory.host.refs == 0)
    if engine.host_pool is not None:
        engine.host_pool.data[torch.from_numpy(free_host)] = torch.nan
    return len(free) + len(free_host)
