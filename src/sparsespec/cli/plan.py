"""`sparsespec plan`: what speculation gains, by formula or by simulation, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from typing import Any, TypeVar

from sparsespec.cli.flags import add_dataclass_flags
from sparsespec.core.errors import InvalidValueError
from sparsespec.plan.options import DraftOptions, FormulaOptions, LoadOptions, SystemOptions

_DESCRIPTION = """Without --simulate: SparseSpec's closed-form speed-up for every k up to --num-speculative-tokens, and the best k.
With it: replays requests over a cost model and prints pool use, recomputed tokens, throughput and latency by policy."""
_WIDTH = 120  # columns where there is no terminal
_ALL_UP_TO = 10_000  # requests; with more, one setting alone is simulated unless more is asked for
# What each study sets itself.
_KV = {"kv_policy", "reserve_tokens"}
_PARTS = _KV | {"method", "schedule", "verification"}
VARIED: dict[str, set[str]] = {"one": set(), "figure5": _KV, "ablation": _PARTS, "routers": {"router"}, "all": _PARTS}
T = TypeVar("T")


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="predict speed-ups, or simulate an engine or a fleet", description=_DESCRIPTION,
                                 allow_abbrev=False)
    parser.add_argument("--simulate", action="store_true", help="replay requests instead of evaluating the formula")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--study", choices=tuple(VARIED), default=argparse.SUPPRESS,
                        help="what to compare on the load: figure5 varies the KV policy, ablation adds one part of the system "
                        "after the other, routers varies the router, one runs the settings below alone (default: all, which is "
                        f"figure5 and ablation; one where a setting that these vary is given, with the exact engine, several "
                        f"replicas or more than {_ALL_UP_TO:,} requests)")
    parser.add_argument("--plot", metavar="FILE", default=argparse.SUPPRESS, help="draw the runs (needs matplotlib)")
    for title, cls in (("machine, model and drafts", DraftOptions), ("formula", FormulaOptions), ("simulated load", LoadOptions),
                       ("simulated system", SystemOptions)):
        add_dataclass_flags(parser.add_argument_group(title), cls)
    parser.set_defaults(command=run)


def _options(cls: type[T], args: argparse.Namespace) -> T:
    return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})  # type: ignore[arg-type]


def run(args: argparse.Namespace) -> int:
    draft = _options(DraftOptions, args)
    _refuse_idle(args)
    from sparsespec.plan.costs import CostModel, Gpu, load_model

    costs = CostModel(Gpu.load(draft.gpu), load_model(draft.model))
    return _simulate(args, draft, costs) if args.simulate else _formula(args, draft, costs)


def _refuse_idle(args: argparse.Namespace) -> None:
    """Raise for a flag that the chosen half of the command does not look at."""
    idle = [f.name for f in fields(FormulaOptions)] if args.simulate else [
        "study", "plot", *(f.name for cls in (LoadOptions, SystemOptions) for f in fields(cls))]
    for name in idle:
        if hasattr(args, name):
            raise InvalidValueError("--" + name.replace("_", "-"), getattr(args, name),
                                    f"has no effect {'with' if args.simulate else 'without'} --simulate",
                                    f"{'Leave out' if args.simulate else 'Add'} --simulate")


def _machine(draft: DraftOptions, costs: Any) -> dict[str, Any]:
    gpu = costs.gpu
    return {"gpu": gpu.name, "derived": gpu.derived, "model": draft.model, "products_scaled_from": costs.scaled_from,
            "sources": gpu.sources, "draft": {**asdict(draft), "profile": draft.profile}}


def _formula(args: argparse.Namespace, draft: DraftOptions, costs: Any) -> int:
    point = _options(FormulaOptions, args)
    from sparsespec.plan.speedup import best, gains

    found = gains(costs, point.batch_size, point.context_len, draft.sparse_attn_ratio, draft.profile, point.alpha, draft.min_budget)
    if args.json:
        json.dump({**_machine(draft, costs), "point": asdict(point), "gains": [asdict(g) for g in found], "best_k": best(found).k},
                  sys.stdout)
        print()
        return 0
    from rich.console import Console

    from sparsespec.plan.tables import about_costs, show_gains

    title = f"{draft.model} on {about_costs(costs)}: {point.batch_size} requests of {point.context_len:,} tokens"
    show_gains(found, title, Console())
    return 0


def _study(args: argparse.Namespace, system: SystemOptions, requests: int) -> str:
    """The study that was asked for or fits. Raises for a setting that it would override."""
    given = {f.name for f in fields(SystemOptions) if hasattr(args, f.name)}
    small = system.engine == "fluid" and system.replicas == 1 and requests <= _ALL_UP_TO
    name: str = getattr(args, "study", "all" if small and not given & VARIED["all"] else "one")
    for varied in sorted(given & VARIED[name]):
        raise InvalidValueError("--" + varied.replace("_", "-"), getattr(args, varied), f"is what study {name} varies",
                                "Leave it out, or use --study one")
    return name


def _simulate(args: argparse.Namespace, draft: DraftOptions, costs: Any) -> int:
    loads, system = _options(LoadOptions, args), _options(SystemOptions, args)
    from rich.console import Console

    from sparsespec.plan.plot import save_plot
    from sparsespec.plan.study import STUDIES, Lab
    from sparsespec.plan.tables import about_costs, about_load, show_study
    from sparsespec.plan.workload import make_load

    load = make_load(loads)
    name = _study(args, system, len(load))
    longest = min(loads.max_output_len, int(load.outputs.max())) if loads.lengths_file else loads.max_output_len
    study = STUDIES[name](Lab(load, costs, draft, system, longest, loads.seed, lambda text: print(text, file=sys.stderr)))
    if args.json:
        json.dump({**_machine(draft, costs), "load": {**asdict(loads), "mean_output": float(load.outputs.mean()),
                                                     "std_output": float(load.outputs.std())}, **study.document()}, sys.stdout)
        print()
    else:
        console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
        capacity = system.kv_cache_tokens or costs.pool_tokens()
        console.print(f"{draft.model} on {about_costs(costs)}, {system.replicas} replicas of {capacity:,} tokens of KV and "
                      f"{system.max_num_seqs} slots\n{about_load(load)}", highlight=False)
        show_study(study, console)
    if hasattr(args, "plot"):
        save_plot(study, args.plot)
    return 0
