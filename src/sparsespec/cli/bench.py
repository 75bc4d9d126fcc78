"""`sparsespec bench`: measurements of the engine on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields

from sparsespec.bench.options import ThroughputOptions
from sparsespec.cli import bench_lab
from sparsespec.cli.flags import add_dataclass_flags, add_engine_flags, engine_kwargs


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="measure the engine", allow_abbrev=False)
    kinds = parser.add_subparsers(title="benchmarks", metavar="KIND", required=True)
    throughput = kinds.add_parser("throughput", help="tokens a second of one batch, plain and speculative", allow_abbrev=False)
    group = throughput.add_argument_group("benchmark")
    add_dataclass_flags(group, ThroughputOptions)
    group.add_argument("--output-len", dest="max_tokens", type=int, metavar="N", default=argparse.SUPPRESS,
                       help="another name of --max-tokens")
    throughput.add_argument("--json", action="store_true", help="one JSON document")
    add_engine_flags(throughput)
    throughput.set_defaults(command=run_throughput)
    bench_lab.register(kinds)


def run_throughput(args: argparse.Namespace) -> int:
    """Exit code 1 where compared outputs differ by more than rounding explains."""
    given = {f.name: getattr(args, f.name) for f in fields(ThroughputOptions) if hasattr(args, f.name)}
    options = ThroughputOptions(**given)
    from rich.console import Console

    from sparsespec.bench.report import document, show_answers, show_table
    from sparsespec.bench.throughput import run

    report = run(options, engine_kwargs(args))
    if args.json:
        json.dump(document(report), sys.stdout)
        print()
    else:
        console = Console(soft_wrap=False)
        if options.show_answers:
            show_answers(report, console)
        show_table(report, console)
    return 0 if report.passed else 1
