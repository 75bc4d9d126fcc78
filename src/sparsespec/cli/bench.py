"""`sparsespec bench`: measurements of the engine on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from typing import TypeVar

from sparsespec.bench.options import LatencyOptions, ServeOptions, ThroughputOptions
from sparsespec.cli import bench_lab
from sparsespec.cli.flags import add_dataclass_flags, add_engine_flags, engine_kwargs

_Options = TypeVar("_Options", ThroughputOptions, LatencyOptions, ServeOptions)


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
    latency = kinds.add_parser("latency", help="seconds of one batch, over several passes", allow_abbrev=False)
    add_dataclass_flags(latency.add_argument_group("benchmark"), LatencyOptions)
    latency.add_argument("--json", action="store_true", help="one JSON document")
    add_engine_flags(latency)
    latency.set_defaults(command=run_latency)
    serve = kinds.add_parser("serve", help="load on a running OpenAI-compatible server, ours or another", allow_abbrev=False)
    group = serve.add_argument_group("benchmark")
    add_dataclass_flags(group, ServeOptions)
    group.add_argument("--random-output-len", "--max-tokens", dest="output_len", type=int, metavar="N", default=argparse.SUPPRESS,
                       help="other names of --output-len")
    serve.add_argument("--json", action="store_true", help="one JSON document")
    serve.set_defaults(command=run_serve)
    bench_lab.register(kinds)


def _given(args: argparse.Namespace, cls: type[_Options]) -> _Options:
    """The options of which some were given as flags."""
    return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})


def run_latency(args: argparse.Namespace) -> int:
    """Always 0."""
    options = _given(args, LatencyOptions)
    from sparsespec.bench.latency import run

    result = run(options, engine_kwargs(args))
    if args.json:
        json.dump(result, sys.stdout)
        print()
    else:
        print(f"Avg latency: {result['avg_latency']:.4f} seconds")
        for percentile, seconds in result["percentiles"].items():
            print(f"{percentile}% percentile latency: {seconds:.4f} seconds")
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """Exit code 1 where a request failed."""
    options = _given(args, ServeOptions)
    from sparsespec.bench.serving.report import block
    from sparsespec.bench.serving.run import run

    result = run(options)
    if args.json:
        json.dump(result, sys.stdout)
        print()
    else:
        print(block(result, options.metrics, options.percentiles))
    return 1 if result["failed"] else 0


def run_throughput(args: argparse.Namespace) -> int:
    """Exit code 1 where compared outputs differ by more than rounding explains."""
    options = _given(args, ThroughputOptions)
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
