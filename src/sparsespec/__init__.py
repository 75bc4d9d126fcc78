"""sparsespec: lossless self-speculative inference. One set of weights drafts with sparse attention and verifies with full.

Names are imported on first use, so that `import sparsespec` and `sparsespec --help` load no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsespec.core.errors import (
        BatchError,
        CapacityError,
        ContextLengthError,
        InvalidValueError,
        ModelLoadError,
        NumericalError,
        SparseSpecError,
        StateError,
        UnknownFieldError,
        UnsupportedError,
    )
    from sparsespec.core.outputs import CompletionOutput, Logprob, RequestOutput
    from sparsespec.core.sampling_params import SamplingParams
    from sparsespec.llm import LLM

_WHERE = {
    "LLM": "sparsespec.llm",
    "SamplingParams": "sparsespec.core.sampling_params",
    **dict.fromkeys(("CompletionOutput", "Logprob", "RequestOutput"), "sparsespec.core.outputs"),
    **dict.fromkeys(("BatchError", "CapacityError", "ContextLengthError", "InvalidValueError", "ModelLoadError",
                     "NumericalError", "SparseSpecError", "StateError", "UnknownFieldError", "UnsupportedError"),
                    "sparsespec.core.errors"),
}

__all__ = [
    "LLM",
    "BatchError",
    "CapacityError",
    "CompletionOutput",
    "ContextLengthError",
    "InvalidValueError",
    "Logprob",
    "ModelLoadError",
    "NumericalError",
    "RequestOutput",
    "SamplingParams",
    "SparseSpecError",
    "StateError",
    "UnknownFieldError",
    "UnsupportedError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("sparsespec")
    elif name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
    else:
        raise AttributeError(f"module 'sparsespec' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
