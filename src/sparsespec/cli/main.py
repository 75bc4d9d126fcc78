"""The `sparsespec` command: one parser, one module a subcommand. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from sparsespec.cli import bench, chat, env, generate, plan, serve
from sparsespec.core.errors import SparseSpecError

Command = Callable[[argparse.Namespace], int]

_DESCRIPTION = """Lossless self-speculative inference: the same weights draft with sparse attention and verify with full
attention. stdout carries results, stderr progress."""


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from sparsespec import __version__

        print(f"sparsespec {__version__}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparsespec", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (generate, chat, serve, bench, plan, env):
        module.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 1 for a failed check, 2 for a wrong setting, 130 when interrupted."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.command(args))
    except SparseSpecError as e:
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout has gone: nothing is left to say, and nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
