"""Typed errors. Each names the field, the value that was given and the remedy."""

from __future__ import annotations

from typing import Any


class SparseSpecError(Exception):
    """Base of every error that the engine raises on purpose."""


class InvalidValueError(SparseSpecError, ValueError):
    """A setting or request field holds a value that cannot be used.

    Attributes: `field` the name as the user writes it, `value` what was given, `remedy` what to do instead.
    """

    def __init__(self, field: str, value: Any, problem: str, remedy: str) -> None:
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy
        try:
            shown = repr(value)
        except RecursionError:
            shown = f"<deeply nested {type(value).__name__}>"
        if len(shown) > 200:
            shown = shown[:197] + "..."
        super().__init__(f"{field}={shown}: {problem}. {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.problem, self.remedy)


class UnknownFieldError(InvalidValueError):
    """A key that no setting has."""


class UnsupportedError(InvalidValueError):
    """A valid request for something that this build or combination does not do."""


class ContextLengthError(InvalidValueError):
    """A prompt that leaves no room for one generated token."""


class CapacityError(InvalidValueError):
    """A request that the KV cache can never hold."""


class StateError(InvalidValueError):
    """A call that what the engine is doing does not allow now."""


class ModelLoadError(InvalidValueError):
    """A model file that is missing, unreadable, truncated, incomplete or of an unknown kind."""


class NumericalError(SparseSpecError):
    """The model produced NaN or infinite logits for one request; the others go on."""

    def __init__(self, request_id: str, position: int) -> None:
        self.field, self.value = "logits", "NaN or inf"
        self.request_id, self.position = request_id, position
        self.remedy = "Check the weights and the dtype (float16 overflows where bfloat16 does not)"
        super().__init__(f"logits=NaN or inf: request {request_id!r} at position {position}. {self.remedy}.")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.request_id, self.position)


class ServiceError(SparseSpecError):
    """A valid request that can't be served now. `retry_after`: seconds after which to try again, None where that is no help."""

    def __init__(self, field: str, value: Any, problem: str, remedy: str, retry_after: int | None = None) -> None:
        self.field, self.value, self.problem, self.remedy, self.retry_after = field, value, problem, remedy, retry_after
        super().__init__(f"{field}={value!r}: {problem}. {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.problem, self.remedy, self.retry_after)


class OverloadedError(ServiceError):
    """The queue is full."""


class UnavailableError(ServiceError):
    """The engine takes no requests: it shuts down, or it failed for good."""


class EngineCrashError(ServiceError):
    """The engine loop failed while it served the request."""


class TimeLimitError(ServiceError):
    """The request's time was over before it had its first token."""


class BatchError(SparseSpecError):
    """Some requests of a call failed; the others finished.

    Attributes: `errors` maps the input index to its error; `outputs` holds the results in input order, None where
    a request failed before it gave any output.
    """

    def __init__(self, errors: dict[int, Exception], outputs: list[Any]) -> None:
        self.errors, self.outputs = errors, outputs
        first = min(errors)
        super().__init__(f"{len(errors)} of {len(outputs)} requests failed; the first, prompt {first}: {errors[first]} "
                         "The other results are in .outputs.")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors, self.outputs)
