"""Copies named tensors into a model's parameters, and accounts for every name on both sides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from sparsespec.core.errors import ModelLoadError

SHOWN = 5  # names that an error lists


class Loadable(Protocol):
    """What a model shows the loader."""

    @property
    def ignored_weights(self) -> Sequence[str] | frozenset[str]: ...

    def weight_targets(self) -> dict[str, Tensor]: ...


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def load_weights(model: Loadable, pairs: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Fill `model.weight_targets()` from (Hugging Face name, tensor) pairs, converting dtype and device.

    Takes one tensor at a time, so that the peak is one copy of the weights and one tensor. `where` names the source
    in errors. Raises ModelLoadError for a name given twice, a shape or kind of number that does not fit, a tensor
    that nothing uses (unless `model.ignored_weights` matches it) and a parameter left unset.
    """
    targets = model.weight_targets()
    ignored = [re.compile(p) for p in model.ignored_weights]
    seen: set[str] = set()
    unused: list[str] = []
    for name, tensor in pairs:
        if name in seen:
            raise ModelLoadError("model", where, f"tensor {name} is there twice", "Remove one of the copies")
        seen.add(name)
        target = targets.get(name)
        if target is None:
            if not any(p.search(name) for p in ignored):
                unused.append(name)
            continue
        if tensor.shape != target.shape:
            raise ModelLoadError("model", where, f"tensor {name} has shape {tuple(tensor.shape)}, "
                                 f"the config asks for {tuple(target.shape)}", "Check that config and weights belong together")
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelLoadError("model", where, f"tensor {name} is {kind}, not a plain float type",
                                 "Use a checkpoint in float32, bfloat16 or float16, or a GGUF file")
        target.copy_(tensor)
    if unused:
        raise ModelLoadError("model", where, f"{len(unused)} tensors are used by nothing: {_names(unused)}",
                             "Use a checkpoint of a supported architecture, without adapters or quantisation scales")
    missing = [name for name in targets if name not in seen]
    if missing:
        raise ModelLoadError("model", where, f"{len(missing)} of {len(targets)} parameters have no tensor: {_names(missing)}",
                             "Use a complete checkpoint")
