"""The engine for an event loop: submit requests, read their outputs as they come, abort them; nothing here blocks.

    engine = AsyncEngine(Engine(config), max_waiting=1024)
    engine.start()                                                  # inside the event loop
    async with await engine.submit([Submission("a", prompt, params)], stream=True) as outputs:
        async for batch in outputs: ...

The engine works in a thread (engine/loop.py). Everything in this module runs in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sparsespec.core.errors import (
    EngineCrashError,
    InvalidValueError,
    OverloadedError,
    ServiceError,
    SparseSpecError,
    TimeLimitError,
    UnavailableError,
)
from sparsespec.core.outputs import RequestOutput
from sparsespec.core.sampling_params import SamplingParams
from sparsespec.engine.admission import Prompt
from sparsespec.engine.engine import Engine
from sparsespec.engine.loop import EngineLoop
from sparsespec.engine.streams import OutputStream
from sparsespec.metrics.observer import RequestObserver, Unobserved

T = TypeVar("T")
log = logging.getLogger(__name__)

TIMEOUT, SHUTDOWN = "timeout", "shutdown"  # stop_reason of what the server itself ended
_WATCH_EVERY = 1.0  # seconds between two looks at the engine's thread
_MAX_RETRY_AFTER = 60
_STOP_WAIT = 10.0  # seconds that closing waits for the step that runs


@dataclass(frozen=True)
class Submission:
    """One prompt for the engine."""

    request_id: str
    prompt: Prompt
    params: SamplingParams


@dataclass
class _Tracked:
    """A request that the engine has. Times on the monotonic clock."""

    stream: OutputStream
    params: SamplingParams
    num_tokens: list[int]
    reasons: list[str | None]
    added: asyncio.Future[int] | None = None
    last_token: float | None = None
    expiry: asyncio.TimerHandle | None = None


class AsyncEngine:
    """See the module.

    max_waiting: completions that may queue beyond those that run at once (max_num_seqs); more are refused with
    OverloadedError. request_timeout: seconds after which a request is ended with what it has; None: no limit.
    make_engine: sets up the engine's successor after a crash; None: the same configuration over the same weights.
    `observer` may be replaced before `start`.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 1024, request_timeout: float | None = None,
                 make_engine: Callable[[], Engine] | None = None) -> None:
        self.config, self.loaded, self.max_model_len = engine.config, engine.loaded, engine.max_model_len
        self.max_pending = engine.config.scheduler.max_num_seqs + max_waiting
        self.request_timeout = request_timeout
        self.observer: RequestObserver = Unobserved()
        self._thread = EngineLoop(engine, make_engine or partial(Engine, engine.config, engine.loaded), self)
        self._compiler = ThreadPoolExecutor(1, "sparsespec-grammar")
        self._tracked: dict[str, _Tracked] = {}
        self._pending = 0  # completions that wait or run
        self._finish_times: deque[float] = deque(maxlen=64)
        self._draining = False
        self._failure: ServiceError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        """Begin to work; call it inside the event loop that all further calls come from."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._watch = self._loop.create_task(self._watch_thread())

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """'ok', 'draining' or 'dead'."""
        if self._failure is not None or not self._thread.alive:
            return "dead"
        return "draining" if self._draining else "ok"

    @property
    def failure(self) -> ServiceError | None:
        """Why the engine is dead."""
        return self._failure

    @property
    def num_pending(self) -> int:
        """Completions that wait or run, as this side counts them."""
        return self._pending

    def stats(self) -> dict[str, Any]:
        """The engine's counters and gauges: at most a twentieth of a second (or a step) old, exact when it is idle."""
        return {**self._thread.stats, "engine_restarts": self._thread.restarts}

    # -- requests ------------------------------------------------------------------------------------------------

    async def submit(self, submissions: Sequence[Submission], *, stream: bool, timeout: float | None = None) -> OutputStream:
        """Queue prompts whose outputs one consumer reads. stream: increments as they come, else one output at each's end.

        timeout: seconds for all of it, where it is less than request_timeout. Raises what Engine.add_request raises (then
        none is queued), OverloadedError, UnavailableError.
        """
        self._check_room(submissions)
        if await self._compile(submissions):
            self._check_room(submissions)  # others came meanwhile
        outputs = OutputStream([s.request_id for s in submissions], self._leave, deltas=stream)
        limit = min((t for t in (timeout, self.request_timeout) if t is not None), default=None)
        try:
            added = [self._add(s, outputs, limit) for s in submissions]
            await asyncio.wait(added)
            lengths = [future.result() for future in added]
        except BaseException:  # refused, or the client has gone meanwhile
            outputs.close()
            raise
        for s, length in zip(submissions, lengths, strict=True):
            self.observer.admitted(length, s.params)
        return outputs

    async def abort(self, request_id: str, stop_reason: str | None = None) -> bool:
        """End a request with what it has: its stream gets the rest, finish_reason "abort". False if it is not there."""
        if request_id not in self._tracked:
            return False
        output = await self.call(partial(_abort, request_id))
        if output is None:
            return False
        for c in output.outputs:
            if c.finish_reason == "abort":
                c.stop_reason = stop_reason
        self._deliver([output])
        return True

    def call(self, command: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Run a function of the engine between two of its steps."""
        return asyncio.wrap_future(self._thread.submit(command))

    async def _compile(self, submissions: Sequence[Submission]) -> bool:
        """Compile grammars outside the engine's thread, which then finds them ready. False: there are none."""
        engine = self._thread.engine
        wanted = {id(s.params): s.params for s in submissions
                  if s.params.structured_outputs is not None or s.params.thinking_token_budget is not None}
        if engine is None or not wanted:
            return False
        for params in wanted.values():
            await asyncio.get_running_loop().run_in_executor(self._compiler, engine.admission.constraints.compile, params)
        return True

    def _check_room(self, submissions: Sequence[Submission]) -> None:
        if self._failure is not None:
            raise self._failure
        if self._draining:
            raise UnavailableError("server", "shutting down", "no new requests are taken", "Send it to another server", 5)
        ids = [s.request_id for s in submissions]
        for i in ids:
            if i in self._tracked or ids.count(i) > 1:
                raise InvalidValueError("request_id", i, "already in use", "Give each request an id of its own")
        count = sum(s.params.n for s in submissions)
        if count > self.max_pending:
            raise InvalidValueError("n", count, f"more completions than the {self.max_pending} that may run and wait at once",
                                    "Ask for fewer")
        if self._pending + count > self.max_pending:
            raise OverloadedError("queue", self._pending, f"full: {self.max_pending} completions run or wait",
                                  "Try again later", self._retry_after())

    def _retry_after(self) -> int:
        """Seconds in which, at the pace of the last completions, a tenth of the queue is gone."""
        times = self._finish_times
        if len(times) < 2:
            return 1
        pace = (time.monotonic() - times[0]) / len(times)
        return max(1, min(_MAX_RETRY_AFTER, math.ceil(pace * self._pending / 10)))

    def _add(self, s: Submission, outputs: OutputStream, limit: float | None) -> asyncio.Future[int]:
        """Track a request and hand it to the engine; gives the length of its prompt."""
        tracked = _Tracked(outputs, s.params, [0] * s.params.n, [None] * s.params.n)
        if limit is not None:
            tracked.expiry = asyncio.get_running_loop().call_later(limit, self._expire, s.request_id)
        self._tracked[s.request_id] = tracked
        self._pending += s.params.n
        self._idle.clear()
        tracked.added = self.call(partial(_add, s, outputs.deltas))
        tracked.added.add_done_callback(_retrieve)
        return tracked.added

    def _untrack(self, request_id: str) -> _Tracked | None:
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            if tracked.expiry is not None:
                tracked.expiry.cancel()
            self._pending -= tracked.params.n
            if not self._tracked:
                self._idle.set()
        return tracked

    def _expire(self, request_id: str) -> None:
        asyncio.ensure_future(self.abort(request_id, TIMEOUT)).add_done_callback(_retrieve)

    def _leave(self, request_ids: list[str]) -> None:
        """The consumer has gone: forget its requests here at once and in the engine before its next step."""
        for request_id in request_ids:
            tracked = self._untrack(request_id)
            if tracked is not None:
                if tracked.added is not None and tracked.added.done() and tracked.added.exception() is None:
                    self.observer.left(tracked.params.n)
                with suppress(UnavailableError):
                    self._thread.submit(partial(_abort, request_id))

    # -- from the engine's thread --------------------------------------------------------------------------------

    def on_outputs(self, outputs: list[RequestOutput]) -> None:
        """One wake-up of the event loop for all outputs of a step."""
        self._post(self._deliver, outputs)

    def on_crash(self, error: BaseException, alive: bool) -> None:
        """What the engine had is lost; what it had not been given yet goes to its successor."""
        self._post(self._crashed, error, alive)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(function, *args)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        now = time.monotonic()
        for output in outputs:
            tracked = self._tracked.get(output.request_id)
            if tracked is None:
                continue
            self._count(tracked, output, now)
            if not output.finished:
                tracked.stream.put(output)
                continue
            self._untrack(output.request_id)
            self._finish_times.append(now)
            if (error := _error_of(output, tracked)) is not None:
                tracked.stream.fail(error)
            else:
                tracked.stream.put(output)

    def _count(self, tracked: _Tracked, output: RequestOutput, now: float) -> None:
        gained = 0
        for c in output.outputs:
            gained += len(c.token_ids)
            tracked.num_tokens[c.index] += len(c.token_ids)
            tracked.reasons[c.index] = c.finish_reason
        if gained and tracked.stream.deltas:
            if tracked.last_token is not None:
                self.observer.grew(gained, now - tracked.last_token)
            tracked.last_token = now
        if output.finished and output.metrics is not None:
            self.observer.ended([r or "abort" for r in tracked.reasons], tracked.num_tokens, output.metrics)

    def _crashed(self, error: BaseException, alive: bool) -> None:
        reason = f"{type(error).__name__}: {error}"
        if alive:
            self.observer.restarted()
            failure: ServiceError = EngineCrashError("engine", reason, "it failed and is set up anew", "Send the request again")
        else:
            failure = EngineCrashError("engine", reason, "it failed", "Restart the server")
            self._failure = UnavailableError("engine", reason, "it failed for good", "Restart the server")
        for request_id, tracked in list(self._tracked.items()):
            if not alive or (tracked.added is not None and tracked.added.done()):
                self._untrack(request_id)
                tracked.stream.fail(failure)

    async def _watch_thread(self) -> None:
        """The thread may also end without a word; nobody may wait for it for ever."""
        while True:
            await asyncio.sleep(_WATCH_EVERY)
            if not self._thread.alive and self._failure is None:
                self._crashed(RuntimeError("the engine's thread ended"), alive=False)

    # -- the end -------------------------------------------------------------------------------------------------

    async def drain(self, timeout: float) -> None:
        """Take nothing new, give what runs `timeout` seconds, then end it with what it has."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            log.warning("Aborting %d requests that still run after %g s", len(self._tracked), timeout)
            await asyncio.gather(*(self.abort(i, SHUTDOWN) for i in list(self._tracked)), return_exceptions=True)

    async def close(self) -> None:
        """Stop the thread. Requests that still run are lost."""
        self._draining = True
        if self._watch is not None:
            self._watch.cancel()
        self._compiler.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._thread.stop, _STOP_WAIT)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Look at a result that nobody may wait for any more, so that asyncio does not complain."""
    if not future.cancelled():
        future.exception()


def _add(s: Submission, stream: bool, engine: Engine) -> int:
    """Queue a prompt; gives its length in tokens."""
    engine.add_request(s.request_id, s.prompt, s.params, stream=stream, deltas=stream)
    return len(engine.groups[s.request_id].prompt_token_ids)


def _abort(request_id: str, engine: Engine) -> RequestOutput | None:
    return engine.abort(request_id)


def _error_of(output: RequestOutput, tracked: _Tracked) -> SparseSpecError | None:
    """The error that a finished request ends with, if it does."""
    if output.error is not None:
        return output.error
    if any(tracked.num_tokens):
        return None
    reason = next((c.stop_reason for c in output.outputs if c.finish_reason == "abort"), None)
    if reason == TIMEOUT:
        return TimeLimitError("timeout", "reached", "before the first token", "Allow more time, or try again later")
    if reason == SHUTDOWN:
        return UnavailableError("server", "shutting down", "before the first token", "Send it to another server", 5)
    return None
