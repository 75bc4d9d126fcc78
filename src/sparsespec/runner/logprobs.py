"""Log probabilities for the requests that ask for them; the others pay nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparsespec.core.outputs import LogprobDict
from sparsespec.core.plan import StepPlan, StepResult
from sparsespec.core.request import Request
from sparsespec.sampling.logprobs import gather_logprobs, raw_logprobs, to_dicts

if TYPE_CHECKING:
    from sparsespec.runner.batch import InputBatch
    from sparsespec.runner.model_runner import ModelRunner


class LogprobCollector:
    """mode: raw_logprobs, of the model's logits; processed_logprobs, after penalties, temperature and truncation."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._prompts: dict[str, list[LogprobDict | None]] = {}
