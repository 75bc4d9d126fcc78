"""Sends a step's small integer arrays to fixed places on the device with one copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_DEPTH = 3  # host buffers in turn, so that a copy in flight is never overwritten


class Staging:
    """Named int32 parts at fixed addresses. The last one may be long: only what is used of it travels."""

    def __init__(self, device: torch.device, sizes: dict[str, int]) -> None:
        self.sizes = {name: -(-size // 16) * 16 for name, size in sizes.items()}
        ends = np.cumsum(list(self.sizes.values())).tolist()
        self._at = {name: end - size for (name, size), end in zip(self.sizes.items(), ends, strict=True)}
        pin = device.type == "cuda"
        self._device = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        self._host = [torch.zeros(ends[-1], dtype=torch.int32, pin_memory=pin) for _ in range(_DEPTH)]
        self._sent = [torch.cuda.Event() for _ in range(_DEPTH)] if pin else []
        self._turn = 0

    def part(self, name: str) -> Tensor:
        """The device's copy of a part."""
        return self._device[self._at[name]:self._at[name] + self.sizes[name]]

    def send(self, arrays: dict[str, npt.NDArray[np.int32]]) -> None:
        """Copy all parts; raises ValueError for one that is larger than its place."""
        self._turn = (self._turn + 1) % _DEPTH
        host = self._host[self._turn]
        if self._sent:
            self._sent[self._turn].synchronize()
        view, end = host.numpy(), 0
        for name, array in arrays.items():
            if array.size > self.sizes[name]:
                raise ValueError(f"{name} has {array.size} numbers and room for {self.sizes[name]}")
            end = self._at[name] + array.size
            view[self._at[name]:end] = array.reshape(-1)
        self._device[:end].copy_(host[:end], non_blocking=True)
        if self._sent:
            self._sent[self._turn].record()
