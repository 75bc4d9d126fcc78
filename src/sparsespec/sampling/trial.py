"""Tries a grammar in a child process before the engine takes it, since compiling or following one has no bound of its own.

A regex of forty characters can keep xgrammar busy for minutes, in a call that can't be interrupted. A child process can be:
it compiles the grammar, follows it through a random text, and dies with the trial if it takes too much time or memory.
What the library warns that it leaves out is an error here.
"""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_MEMORY = 2 << 30  # bytes that a trial may add to what the process has
_WALL = 60.0  # seconds until a trial is given up that gets no processor
_TOKENS = 64


@dataclass(frozen=True)
class Bounds:
    """CPU seconds for compiling and trying a grammar, and for any one token of the trial."""

    seconds: int = 5
    token_seconds: float = 0.1


def try_grammar(compile_it: Callable[[], Any], vocab_size: int, stop_ids: list[int], bounds: Bounds) -> str | None:
    """None if the grammar may be used, else what is wrong with it, in words. Where there is no fork, nothing is tried.

    compile_it must not need other threads: a child has none of them.
    """
    if not hasattr(os, "fork"):
        return None
    out, into = os.pipe()
    try:
        child = os.fork()
    except OSError as e:
        os.close(out)
        os.close(into)
        return f"can't be tried ({e})"
    if child == 0:
        try:
            os.closerange(3, into)  # a server's sockets among them: a child that outlives it must not hold its port
            os.closerange(into + 1, os.sysconf("SC_OPEN_MAX"))
            os.write(into, _trial(compile_it, vocab_size, stop_ids, bounds).encode("utf8", "replace")[:4096])
        finally:
            os._exit(0)
    os.close(into)
    try:
        ready, _, _ = select.select([out], [], [], _WALL)
        verdict = os.read(out, 4096).decode("utf8", "replace") if ready else ""
    finally:
        os.close(out)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not verdict:
        return f"takes more than {bounds.seconds} s or {_MEMORY >> 30} GiB to compile or to follow"
    return None if verdict == "ok" else verdict.removeprefix("error ")


def _trial(compile_it: Callable[[], Any], vocab_size: int, stop_ids: list[int], bounds: Bounds) -> str:
    """In the child: "ok", or "error " and a message."""
    try:
        with open("/proc/self/statm") as f:
            used = int(f.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    except OSError:
        pass  # not Linux: time is bounded still
    resource.setrlimit(resource.RLIMIT_CPU, (bounds.seconds, bounds.seconds))
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)  # where the library says what it will not observe
        try:
            grammar = compile_it()
            said.seek(0)
            warnings = said.read().decode("utf8", "replace")
            if "Warning: " in warnings:
                return "error " + warnings.split("Warning: ", 1)[1].split("\n", 1)[0]
            longest = _follow(grammar, vocab_size, stop_ids)
        except Exception as e:
            return f"error {e}"
    return "ok" if longest <= bounds.token_seconds else f"error takes {longest * 1e3:.0f} ms to follow by a single token"


def _follow(grammar: Any, vocab_size: int, stop_ids: list[int]) -> float:
    """CPU seconds of the slowest token of a random text."""
    import xgrammar

    matcher, rng, slowest = xgrammar.GrammarMatcher(grammar, override_stop_tokens=stop_ids), random.Random(0), 0.0
    bits = np.zeros((1, -(-vocab_size // 32)), np.int32)
    for _ in range(_TOKENS):
        start = time.process_time()
        matcher.fill_next_token_bitmask(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size])
        if not len(allowed):
            break
        matcher.accept_token(int(allowed[rng.randrange(len(allowed))]))
        slowest = max(slowest, time.process_time() - start)
        if matcher.is_terminated():
            break
    return slowest
