"""Synthetic length traces of reasoning workloads: how long prompts and outputs are, with no text.

Source: SparseSpec (arXiv 2512.01278), table 1, Qwen3-14B. For AIME it gives mean and deviation of the output length; for
OlympiadBench and LiveCodeBench only the range of the means is known here (10 K to 13 K tokens): its middle is used, with
AIME's ratio of deviation to mean. Prompts have 124 to 148 tokens. Lengths are drawn from a gamma distribution, which has
the right moments and the long right tail of such outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsespec.core.errors import InvalidValueError

_INPUT = (124, 148)


@dataclass(frozen=True)
class Trace:
    """Output lengths in tokens: mean and standard deviation. estimated: not a published figure, see the module."""

    name: str
    mean: float
    deviation: float
    estimated: bool

    def lengths(self, count: int, seed: int, scale: float = 1.0) -> list[tuple[int, int]]:
        """(prompt tokens, output tokens) of `count` requests; `scale` shortens both, for small models and slow machines."""
        rng = np.random.default_rng(seed)
        shape = (self.mean / self.deviation) ** 2
        inputs = rng.integers(_INPUT[0], _INPUT[1] + 1, count) * scale
        outputs = rng.gamma(shape, self.mean / shape, count) * scale
        return [(max(1, round(i)), max(1, round(o))) for i, o in zip(inputs.tolist(), outputs.tolist(), strict=True)]


_AIME = Trace("aime", 13185, 7626, estimated=False)
_MIDDLE = 11500.0
TRACES = {t.name: t for t in (_AIME, *(
    Trace(name, _MIDDLE, _MIDDLE * _AIME.deviation / _AIME.mean, estimated=True) for name in ("olympiadbench", "livecodebench")))}


def trace(name: str) -> Trace:
    """A trace by name. Raises InvalidValueError."""
    if name not in TRACES:
        raise InvalidValueError("dataset", f"trace={name}", "unknown trace", f"Choose from: {', '.join(TRACES)}")
    return TRACES[name]
