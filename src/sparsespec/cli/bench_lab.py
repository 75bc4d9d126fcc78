"""`sparsespec bench acceptance` and `bench sweep`: the laboratory of draft policies."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

from sparsespec.bench.lab.options import AcceptanceOptions, SweepOptions
from sparsespec.cli.flags import add_dataclass_flags, add_engine_flags, engine_kwargs
from sparsespec.config.fields import from_dict

Options = type[AcceptanceOptions] | type[SweepOptions]
_KINDS: tuple[tuple[str, Options, str], ...] = (
    ("acceptance", AcceptanceOptions, "what each draft policy accepts and reads, and would gain on a GPU"),
    ("sweep", SweepOptions, "the same over the draft length and over the share of the KV cache"))


def register(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, options, text in _KINDS:
        parser = kinds.add_parser(name, help=text, description=options.__doc__, allow_abbrev=False)
        add_dataclass_flags(parser.add_argument_group("benchmark"), options)
        parser.add_argument("--json", action="store_true", help="one JSON document")
        parser.add_argument("--plot", type=Path, metavar="DIR", help="write plots to this folder")
        add_engine_flags(parser)
        parser.set_defaults(command=run, options=options)


def options_from(args: argparse.Namespace) -> AcceptanceOptions | SweepOptions:
    """The options that the flags describe. Raises InvalidValueError."""
    cls: Options = args.options
    given = {f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    options: AcceptanceOptions | SweepOptions = from_dict(cls, values, "bench")
    return options


def run(args: argparse.Namespace) -> int:
    """Exit code 1 where a greedy output differs from plain decoding by more than rounding explains."""
    options = options_from(args)
    from rich.console import Console

    from sparsespec.bench.lab.matrix import make_cells
    from sparsespec.bench.lab.run import run as measure
    from sparsespec.bench.lab.show import WIDTH, document, show

    report = measure(options, make_cells(options), engine_kwargs(args))
    if args.json:
        json.dump(document(report, options), sys.stdout)
        print()
    else:
        console = Console()
        show(report, Console(width=max(console.width, WIDTH)))
    if args.plot is not None:
        from sparsespec.bench.lab.plots import draw

        for path in draw(report.cells, args.plot):
            print(path, file=sys.stderr)
    return 0 if report.passed else 1
