"""Outputs of requests on their way to one consumer in the event loop.

A consumer that is slower than the engine is never waited for: what it has not taken yet is merged into one output a
request, so what piles up is bounded by the text itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from sparsespec.core.outputs import CompletionOutput, RequestOutput


class OutputStream:
    """Async iterator over batches of outputs, one a request in each; ends when all its requests have.

    Use it as a context manager: leaving it early aborts what still runs. deltas: outputs are increments to be joined.
    """

    def __init__(self, request_ids: Sequence[str], on_close: Callable[[list[str]], None], *, deltas: bool) -> None:
        self.request_ids = list(request_ids)
        self.deltas = deltas
        self._running = set(request_ids)
        self._pending: dict[str, RequestOutput] = {}
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self._on_close = on_close

    def put(self, output: RequestOutput) -> None:
        """Take an output; only from the event loop."""
        before = self._pending.get(output.request_id)
        self._pending[output.request_id] = merge(before, output) if before is not None and self.deltas else output
        if output.finished:
            self._running.discard(output.request_id)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """End with an error, which the consumer meets after the outputs that are there already."""
        self._error = self._error or error
        self._ready.set()

    def close(self) -> None:
        """Abort what still runs."""
        running, self._running = list(self._running), set()
        if running:
            self._on_close(running)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> list[RequestOutput]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._running:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        batch, self._pending = list(self._pending.values()), {}
        return batch

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two increments of one request as one. `first` is changed."""
    by_index = {c.index: c for c in first.outputs}
    for new in second.outputs:
        old = by_index.get(new.index)
        if old is None:
            first.outputs.append(new)
        else:
            _extend(old, new)
    first.finished, first.error, first.metrics = second.finished, second.error, second.metrics
    first.prompt_logprobs = second.prompt_logprobs
    return first


def _extend(old: CompletionOutput, new: CompletionOutput) -> None:
    old.text += new.text
    old.token_ids += new.token_ids
    old.from_draft += new.from_draft
    if old.logprobs is not None and new.logprobs is not None:
        old.logprobs += new.logprobs
    old.cumulative_logprob, old.finish_reason, old.stop_reason = new.cumulative_logprob, new.finish_reason, new.stop_reason
