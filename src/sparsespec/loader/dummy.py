"""Random weights for any architecture: for tests and for benchmarks, where only shapes matter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

EMBEDDING_STD = 0.02


def fill_random(targets: Mapping[str, Tensor], seed: int, device: torch.device) -> None:
    """Fill parameters on their device, the same for the same seed, device kind and shapes.

    Norms are one, biases zero, matrices normal with a deviation of 1/sqrt(inputs), so that activations keep their size.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, target in targets.items():
        if name.endswith("norm.weight"):
            target.fill_(1)
        elif name.endswith(".bias"):
            target.zero_()
        else:
            std = EMBEDDING_STD if "embed_tokens" in name else target.shape[-1] ** -0.5
            target.normal_(0, std, generator=generator)
