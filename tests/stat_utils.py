"""Chi-square goodness of fit for samplers, with cells too rare for the approximation merged into one."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats
from torch import Tensor

SOUND = 1e-4
"""A sound sampler's p-value is at least this on each of the fixed seeds."""
BROKEN = 1e-6
"""A sampler broken on purpose must fall below this, or the test has no power."""


def chi_square(samples: Tensor, probs: Tensor, *, rare: float = 5.0) -> float:
    """p-value of samples, int64 [n] in [0, cells), under probs [cells]. 0 if anything impossible was drawn."""
    expected = probs.double().flatten() * samples.numel()
    observed = torch.bincount(samples.flatten(), minlength=expected.numel()).double()
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    common = expected >= rare
    f_exp = np.append(expected[common].numpy(), expected[~common].sum().item())
    f_obs = np.append(observed[common].numpy(), observed[~common].sum().item())
    if f_exp[-1] < rare:  # too rare even together: join the smallest common cell
        smallest = int(f_exp[:-1].argmin())
        f_exp[smallest] += f_exp[-1]
        f_obs[smallest] += f_obs[-1]
        f_exp, f_obs = f_exp[:-1], f_obs[:-1]
    if len(f_exp) < 2:
        raise ValueError("fewer than two cells: nothing to test")
    return float(stats.chisquare(f_obs, f_exp * f_obs.sum() / f_exp.sum()).pvalue)
