"""`sparsespec env`: what a bug report needs to know of this machine and installation."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import metadata
from typing import Any

_PACKAGES = ("sparsespec", "torch", "transformers", "tokenizers", "safetensors", "gguf", "huggingface-hub", "numpy", "triton",
             "flashinfer-python")
_GIB = 1024**3


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("env", help="show versions, devices and memory", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.set_defaults(command=run)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _memory_gib() -> dict[str, float]:
    page = os.sysconf("SC_PAGE_SIZE")
    return {"total": round(page * os.sysconf("SC_PHYS_PAGES") / _GIB, 2),
            "available": round(page * os.sysconf("SC_AVPHYS_PAGES") / _GIB, 2)}


def _gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        found.append({"index": i, "name": p.name, "capability": f"{p.major}.{p.minor}", "processors": p.multi_processor_count,
                      "memory_gib": round(total / _GIB, 2), "free_gib": round(free / _GIB, 2)})
    return found


def collect() -> dict[str, Any]:
    """Everything `env` shows, as plain data."""
    import torch

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(),
        "cpu": {"architecture": platform.machine(), "cores": os.cpu_count(), "usable": len(os.sched_getaffinity(0)),
                "torch_threads": torch.get_num_threads(), "memory_gib": _memory_gib()},
        "cuda": {"torch_built_for": torch.version.cuda, "available": torch.cuda.is_available(), "gpus": _gpus()},
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }


def run(args: argparse.Namespace) -> int:
    info = collect()
    if args.json:
        print(json.dumps(info, indent=2))
        return 0
    cpu, cuda = info["cpu"], info["cuda"]
    print(f"python {info['python']} on {info['platform']}")
    for name, version in info["packages"].items():
        print(f"  {name:18} {version or '-'}")
    print(f"cpu: {cpu['architecture']}, {cpu['usable']} of {cpu['cores']} cores usable, {cpu['torch_threads']} torch threads, "
          f"{cpu['memory_gib']['available']:.1f} of {cpu['memory_gib']['total']:.1f} GiB free")
    print(f"cuda: {'built for ' + cuda['torch_built_for'] if cuda['torch_built_for'] else 'not in this torch'}, "
          f"{len(cuda['gpus'])} GPUs")
    for gpu in cuda["gpus"]:
        print(f"  {gpu['index']}: {gpu['name']}, compute {gpu['capability']}, {gpu['processors']} processors, "
              f"{gpu['free_gib']:.1f} of {gpu['memory_gib']:.1f} GiB free")
    print(f"device that 'auto' takes: {info['device']}")
    return 0
