"""Faults of the KV memory at will: copies that end late or fail, a host without memory, and checks after every step.

    with use_copier(llm, lambda inner: LateCopier(inner, delay=lambda: 3)):
        llm.generate(...)

All take an `LLM` or an `Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from sparsespec.engine.engine import Engine
from sparsespec.kv.allocator import IntArray
from sparsespec.kv.copier import Copier, CopyError, Side
from sparsespec.llm import LLM


class LateCopier:
    """Ends each copy `delay()` iterations late and reads its source only then."""

    def __init__(self, inner: Copier, delay: Callable[[], int]) -> None:
        self.inner, self.delay = inner, delay

    def copy(self, src: Side, dst: Side, src_pages: IntArray, dst_pages: IntArray) -> Any:
        return {"left": self.delay(), "pages": (src, dst, src_pages, dst_pages)}

    def done(self, handle: Any) -> bool:
        if handle["left"] > 0:
            handle["left"] -= 1
            return False
        if "inner" not in handle:
            handle["inner"] = self.inner.copy(*handle["pages"])
        return self.inner.done(handle["inner"])


class FailingCopier:
    """Copies of which `fails(source side)` says so fail outright."""

    def __init__(self, inner: Copier, fails: Callable[[Side], bool]) -> None:
        self.inner, self.fails = inner, fails

    def copy(self, src: Side, dst: Side, src_pages: IntArray, dst_pages: IntArray) -> Any:
        if self.fails(src):
            raise CopyError("made to fail")
        return self.inner.copy(src, dst, src_pages, dst_pages)

    def done(self, handle: Any) -> bool:
        return self.inner.done(handle)


def _engine(llm: LLM | Engine) -> Engine:
    return llm.engine if isinstance(llm, LLM) else llm


@contextmanager
def use_copier(llm: LLM | Engine, wrap: Callable[[Copier], Copier]) -> Iterator[None]:
    """While open, pages are copied by `wrap(the engine's copier)`."""
    transfers = _engine(llm).scheduler.memory.transfers
    before, transfers.copier = transfers.copier, wrap(transfers.copier)
    try:
        yield
    finally:
        transfers.copier = before


@contextmanager
def no_host_memory() -> Iterator[None]:
    """While open, host pools can not be allocated."""
    with mock.patch("sparsespec.kv.host_pool.allocate_host", side_effect=MemoryError("made to fail")):
        yield


def check_integrity(llm: LLM | Engine) -> None:
    """Every page of both pools is held exactly as often as counted. Raises RuntimeError."""
    _engine(llm).scheduler.check()
