"""Which requests a simulation replays: prompt and output lengths, and arrivals.

Output lengths of reasoning models have a long right tail and no values near zero: AIME's 13185 ± 7626 (SparseSpec, Table 1) as a
normal would put 4 % of its answers below 0 tokens. The default is therefore a lognormal; `normal` is a normal cut at 1. Both are
fitted so that mean and deviation still hold after the cut at max_output_len, where that is possible.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsespec.core.errors import InvalidValueError
from sparsespec.plan.options import LoadOptions

Array = npt.NDArray[np.float64]

# Mean and deviation of the output lengths. Known are AIME's, and 10 to 13 K as the means of the other two: the middle is
# taken for both, with AIME's ratio of deviation to mean.
OUTPUTS = {"aime": (13185.0, 7626.0), "olympiadbench": (11500.0, 6650.0), "livecodebench": (11500.0, 6650.0)}
INPUTS = (124, 148)  # tokens of a prompt, both ends included
_QUANTILES = 4096


@dataclass(frozen=True)
class Load:
    """Arrays over requests in order of arrival: tokens of prompt and output (int64), arrival in seconds."""

    prompts: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]
    arrivals: Array

    def __len__(self) -> int:
        return len(self.outputs)


def make_load(options: LoadOptions) -> Load:
    """The load that the options describe; the same seed gives the same load."""
    rng = np.random.default_rng(options.seed)
    if options.lengths_file is not None:
        load, timed = _read(options.lengths_file, rng)
        if timed and options.request_rate is not None:
            raise InvalidValueError("request_rate", options.request_rate, "the lengths file has arrivals of its own",
                                    "Leave one of the two out")
        if timed:
            return load
    else:
        n = options.requests
        mean, std = OUTPUTS[options.dataset]
        if options.mean_output_len is not None:
            mean, std = options.mean_output_len, std / mean * options.mean_output_len
        if options.std_output_len is not None:
            std = options.std_output_len
        outputs = draw_outputs(rng, n, mean, std, options.length_distribution, options.max_output_len)
        load = Load(rng.integers(INPUTS[0], INPUTS[1] + 1, n), outputs, np.zeros(n))
    if options.request_rate is None:
        return load
    return Load(load.prompts, load.outputs, np.cumsum(rng.exponential(1 / options.request_rate, len(load))))


def draw_outputs(rng: np.random.Generator, n: int, mean: float, std: float, shape: str, most: int) -> npt.NDArray[np.int64]:
    """n output lengths in [1, most]. Raises InvalidValueError where `most` leaves no room for the mean."""
    if mean >= most:
        raise InvalidValueError("max_output_len", most, f"below the mean of {mean:g} tokens", "Raise it, or lower mean_output_len")
    if std == 0:
        return np.full(n, round(mean), np.int64)
    location, scale = _fit(mean, std, shape, most)
    if shape == "lognormal":
        values = rng.lognormal(location, scale, n)
    else:
        values = rng.normal(location, scale, n)
        while len(low := np.flatnonzero(values < 1)):
            values[low] = rng.normal(location, scale, len(low))
    return np.clip(np.rint(values), 1, most).astype(np.int64)


def _fit(mean: float, std: float, shape: str, most: int) -> tuple[float, float]:
    """Location and scale (of the logarithm, for a lognormal) whose cut distribution comes closest to mean and std."""
    quantile = NormalDist().inv_cdf
    z = np.array([quantile((i + 0.5) / _QUANTILES) for i in range(_QUANTILES)])
    aim_mean, aim_std = mean, std
    location, scale = mean, std
    for _ in range(100):
        if shape == "lognormal":
            scale = float(np.sqrt(np.log1p((aim_std / aim_mean) ** 2)))
            location = float(np.log(aim_mean)) - scale**2 / 2
            values = np.exp(location + scale * z)
        else:
            location, scale = aim_mean, aim_std
            values = location + scale * z
            values = values[values >= 1]
        values = np.clip(values, 1, most)
        aim_mean = float(np.clip(aim_mean + mean - values.mean(), 0.1 * mean, 2 * mean))
        aim_std = float(np.clip(aim_std + std - values.std(), 0.1 * std, 3 * std))
    return location, scale


def _read(path: str, rng: np.random.Generator) -> tuple[Load, bool]:
    """Load of a lengths file, and whether it gives arrivals. Raises InvalidValueError naming the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidValueError("lengths_file", path, f"cannot be read ({e})", "Check the file") from None
    rows = [_parse(path, i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise InvalidValueError("lengths_file", path, "holds no request", "Give one JSON value a line")
    timed = [row[2] is not None for row in rows]
    if any(timed) and not all(timed):
        raise InvalidValueError("lengths_file", path, "some lines have an arrival and some do not", "Give all or none")
    drawn = rng.integers(INPUTS[0], INPUTS[1] + 1, len(rows))
    prompts = np.array([d if row[0] is None else row[0] for row, d in zip(rows, drawn.tolist(), strict=True)], np.int64)
    outputs = np.array([row[1] for row in rows], np.int64)
    arrivals = np.array([row[2] or 0.0 for row in rows])
    order = np.argsort(arrivals, kind="stable")
    return Load(prompts[order], outputs[order], arrivals[order]), any(timed)


def _parse(path: str, number: int, line: str) -> tuple[int | None, int, float | None]:
    def wrong(problem: str) -> InvalidValueError:
        return InvalidValueError(f"lengths_file line {number}", line.strip(), problem,
                                 'Give 900, [130, 900] or {"output_len": 900, "input_len": 130, "arrival": 0.5}')

    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError:
        raise wrong("not JSON") from None
    prompt: Any = None
    output: Any = None
    arrival: Any = None
    if isinstance(value, dict):
        if unknown := set(value) - {"input_len", "output_len", "arrival"}:
            raise wrong(f"unknown key {sorted(unknown)[0]!r}")
        prompt, output, arrival = value.get("input_len"), value.get("output_len"), value.get("arrival")
    elif isinstance(value, list):
        if len(value) != 2:
            raise wrong("not a pair")
        prompt, output = value
    else:
        output = value
    length: Any
    for length in (output,) if prompt is None else (prompt, output):
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise wrong("lengths are integers of at least 1")
    if arrival is not None and (isinstance(arrival, bool) or not isinstance(arrival, (int, float)) or not 0 <= arrival < 1e12):
        raise wrong("arrival is not a number of seconds")
    return prompt, output, arrival
