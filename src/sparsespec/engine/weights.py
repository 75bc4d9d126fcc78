"""The life of an engine's memory between requests: new weights, sleep, wake-up.

Sleeping gives device memory back without moving a tensor: its storage shrinks to nothing and grows again, so that every
view of it stays valid. CUDA graphs hold addresses, though, and have to be captured anew after waking.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from sparsespec.core.errors import InvalidValueError, StateError
from sparsespec.kv.pool import KVPool
from sparsespec.loader import open_weights
from sparsespec.loader.loaded import LoadedModel
from sparsespec.loader.weights import load_weights

WeightSource = str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class WeightKeeper:
    """Changes and parks the weights of `loaded`, which every engine that shares them sees, and parks one engine's pool."""

    def __init__(self, loaded: LoadedModel, pool: KVPool) -> None:
        self._model, self._pool = loaded.model, pool
        self.asleep = False
        self._parked: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    @property
    def version(self) -> int:
        """Grows with every update, whichever engine made it."""
        return self._model.version

    def check(self) -> None:
        """Raises StateError while no request can be served."""
        if self.asleep:
            raise StateError("sleep", True, "the engine is asleep", "Call wake_up() first")
        if not self._model.complete:
            raise StateError("update_weights", False, "the weights are incomplete since an update failed or a sleep of level 2",
                             "Call update_weights() with a complete set")

    def update(self, source: WeightSource) -> None:
        """Load Hugging Face names → tensors, or a path. Raises ModelLoadError; then the weights are incomplete until one works."""
        if self.asleep:
            raise StateError("update_weights", True, "the engine is asleep", "Call wake_up() first")
        model = self._model
        pairs, where = _pairs(source)
        model.version += 1
        model.complete = False
        model.reopen()
        load_weights(model, pairs, where)
        model.finalize()
        model.complete = True

    def sleep(self, level: int) -> None:
        """1: drop the KV, and move weights from a GPU to the host. 2: drop both. Raises InvalidValueError, StateError."""
        if level not in (1, 2) or isinstance(level, bool):
            raise InvalidValueError("level", level, "not a sleep level", "Give 1 to keep the weights on the host, 2 to drop them")
        if self.asleep:
            return
        self.asleep = True
        self._park(self._pool.data, keep=False)
        if level == 2:
            self._model.complete = False
            self._model.reopen()
        if level == 2 or self._model.device.type != "cpu":
            seen: set[int] = set()
            for tensor in self._model.weight_targets().values():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    self._park(tensor, keep=level == 1)
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Bring everything back; the KV pool is empty, and after level 2 the weights are yet to be updated."""
        while self._parked:
            storage, size, kept = self._parked.pop()
            storage.resize_(size)
            if kept is not None:
                _bytes(storage, kept.numel()).copy_(kept)
        self.asleep = False

    def _park(self, tensor: Tensor, *, keep: bool) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._parked.append((storage, size, _bytes(storage, size).cpu() if keep else None))
        storage.resize_(0)


def _bytes(storage: torch.UntypedStorage, size: int) -> Tensor:
    """A storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,))  # type: ignore[call-overload]


def _pairs(source: WeightSource) -> tuple[Iterator[tuple[str, Tensor]], str]:
    if isinstance(source, (str, Path)):
        return open_weights(str(source)), str(source)
    return iter(source.items() if isinstance(source, Mapping) else source), "update_weights"
