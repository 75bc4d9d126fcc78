"""The engine in a thread of its own: commands go in through a queue, outputs come out a step at a time.

Commands are functions of the engine, run between two steps, so nothing outside ever touches the engine while it works.
When a step fails, what runs is lost, and the engine is set up anew once, over the same weights; after a second failure
the loop is dead and says so.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from sparsespec.core.errors import SparseSpecError, UnavailableError
from sparsespec.core.outputs import RequestOutput
from sparsespec.engine.engine import Engine

T = TypeVar("T")
log = logging.getLogger(__name__)

_STATS_EVERY = 0.05  # seconds between two snapshots of a busy engine
_BLOCKED_WAIT = 0.005  # seconds between two looks at an engine that has work but cannot run any
_RESTARTS = 1


class Listener(Protocol):
    """Who is told; all calls come from the engine's thread."""

    def on_outputs(self, outputs: list[RequestOutput]) -> None:
        """Outputs of one step."""

    def on_crash(self, error: BaseException, alive: bool) -> None:
        """The engine failed with all it had. alive: it is set up anew; False may follow if that fails too."""


class EngineLoop:
    """See the module. make_engine: a new engine like the first, after that one was dropped."""

    def __init__(self, engine: Engine, make_engine: Callable[[], Engine], listener: Listener) -> None:
        self.engine: Engine | None = engine
        self._make_engine, self._listener = make_engine, listener
        self._commands: queue.SimpleQueue[tuple[Callable[[Engine], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sparsespec-engine", daemon=True)
        self._stopped, self._lock = False, threading.Lock()
        self.stats: dict[str, Any] = engine.stats()
        self._stats_at = 0.0
        self.restarts = 0

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether commands are still taken."""
        return self._thread.is_alive() and not self._stopped

    def submit(self, command: Callable[[Engine], T]) -> Future[T]:
        """Run `command` on the engine between two steps. Raises UnavailableError once the loop has ended."""
        future: Future[T] = Future()
        with self._lock:
            if self._stopped:
                raise UnavailableError("engine", "stopped", "it failed twice or was shut down", "Restart the server")
            self._commands.put((command, future))
        return future

    def stop(self, timeout: float) -> None:
        """End the thread after the step that runs now; waits for it for `timeout` seconds."""
        self._commands.put(None)
        self._thread.join(timeout)

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._serve_safely():
                pass
        finally:
            with self._lock:
                self._stopped = True
            self._refuse_queued()

    def _serve_safely(self) -> bool:
        """Serve until told to stop (False) or until a failure that was survived (True)."""
        try:
            self._serve()
            return False
        except BaseException as error:  # a thread that is told to exit must not leave its requests hanging either
            log.critical("The engine loop failed", exc_info=error)
            traceback.clear_frames(error.__traceback__)  # they hold the engine, whose memory its successor needs
            alive = self.restarts < _RESTARTS
            self._listener.on_crash(error, alive)
            return alive and self._restart()

    def _serve(self) -> None:
        engine = self.engine
        if engine is None:
            raise RuntimeError("no engine to serve with")
        self._publish(engine, now=True)
        while self._take_commands(engine):
            if engine.has_work():
                outputs = engine.step()
                if outputs:
                    self._listener.on_outputs(outputs)
            self._publish(engine, now=not engine.has_work())

    def _take_commands(self, engine: Engine) -> bool:
        """Run what is queued; waits for something where the engine has nothing to do. False: told to stop."""
        wait: float | None = None
        if engine.has_work():
            wait = 0.0 if engine.scheduler.num_running else _BLOCKED_WAIT
        while True:
            try:
                item = self._commands.get(wait != 0.0, wait)
            except queue.Empty:
                return True
            if item is None:
                return False
            command, future = item
            if future.set_running_or_notify_cancel():
                self._answer(engine, command, future)
            wait = 0.0

    @staticmethod
    def _answer(engine: Engine, command: Callable[[Engine], Any], future: Future[Any]) -> None:
        try:
            result = command(engine)
        except SparseSpecError as error:
            future.set_exception(error)
        except Exception as error:
            log.error("A command to the engine failed", exc_info=error)
            future.set_exception(error)
        except BaseException as error:
            future.set_exception(error)
            raise
        else:
            future.set_result(result)

    def _publish(self, engine: Engine, now: bool) -> None:
        t = time.monotonic()
        if now or t - self._stats_at >= _STATS_EVERY:
            self.stats, self._stats_at = engine.stats(), t

    def _restart(self) -> bool:
        if self.engine is not None:
            self.engine.pipeline.close()
        self.engine = None  # before its successor takes as much memory
        gc.collect()
        try:
            self.engine = self._make_engine()
        except BaseException as error:
            log.critical("The engine could not be set up anew", exc_info=error)
            self._listener.on_crash(error, False)
            return False
        self.restarts += 1
        return True

    def _refuse_queued(self) -> None:
        while True:
            try:
                item = self._commands.get_nowait()
            except queue.Empty:
                return
            if item is not None and item[1].set_running_or_notify_cancel():
                item[1].set_exception(UnavailableError("engine", "stopped", "it failed twice or was shut down",
                                                       "Restart the server"))
