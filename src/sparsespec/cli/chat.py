"""`sparsespec chat`: a conversation in the terminal. /reset forgets it, /quit or end of input leaves."""

from __future__ import annotations

import argparse
import sys

from sparsespec.cli.flags import add_engine_flags, add_sampling_flags, engine_kwargs, sampling_params
from sparsespec.cli.generate import deltas
from sparsespec.core.errors import ContextLengthError, InvalidValueError

MAX_TOKENS = 512


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("chat", help="talk with a model in the terminal", allow_abbrev=False)
    parser.add_argument("--system", metavar="TEXT", help="system message at the beginning of the conversation")
    add_sampling_flags(parser, max_tokens=MAX_TOKENS)
    add_engine_flags(parser)
    parser.set_defaults(command=run)


def _ask() -> str | None:
    """The next line, None at the end of input. The prompt mark goes to stderr: stdout carries the answers alone."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, max_tokens=MAX_TOKENS)
    if params.n != 1:
        raise InvalidValueError("--n", params.n, "a conversation has one answer a turn", "Leave it out")
    from sparsespec.llm import LLM

    llm = LLM(**engine_kwargs(args))
    system = [{"role": "system", "content": args.system}] if args.system else []
    history = list(system)
    print("/reset starts over, /quit leaves", file=sys.stderr)
    while (line := _ask()) is not None and line != "/quit":
        if line == "/reset":
            history = list(system)
            print("(forgotten)", file=sys.stderr)
            continue
        if not line:
            continue
        history.append({"role": "user", "content": line})
        try:
            answer = ""
            for delta in deltas(llm.stream(llm.apply_chat_template(history), params)):
                answer += delta
                print(delta, end="", flush=True)
            print()
            history.append({"role": "assistant", "content": answer})
        except ContextLengthError as e:
            history.pop()
            print(f"error: {e} Use /reset to start over.", file=sys.stderr)
        except KeyboardInterrupt:  # stops this answer alone
            history.pop()
            print("\n(stopped)", file=sys.stderr)
    return 0
