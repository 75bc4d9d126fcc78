"""What one request asks of the sampler. Names and defaults are vLLM's; values are checked on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from sparsespec.core.errors import InvalidValueError, UnknownFieldError
from sparsespec.core.structured_outputs import StructuredOutputsParams

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
_GREEDY_BELOW = 1e-5  # vLLM's threshold: a smaller temperature means greedy

_MAX_TEMPERATURE, _MAX_REPETITION = 1e4, 1e4  # beyond these logits leave what float32 can hold


def _real(name: str, value: Any) -> float:
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond all floats
        pass
    raise InvalidValueError(name, value, "not a finite number", f"Give {name} as a number")


def _integer(name: str, value: Any, low: int, high: int | None = None, remedy: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValueError(name, value, "not an integer", f"Give {name} as an integer")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidValueError(name, value, "out of range", remedy or f"Give {name} {bound}")
    return value


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling settings of one request (vLLM's names).

    n: completions a prompt. temperature: 0 is greedy. top_p in (0, 1]; top_k: 0 or -1 keeps all; min_p in [0, 1],
    relative to the most likely token. seed: same seed, same prompt, same text, whatever else runs and however it is
    speculated. max_tokens: None runs to the model's limit. stop: strings that end the text and are cut from it unless
    include_stop_str_in_output. logprobs: None off, 0 the sampled token, n the n best besides it.
    logit_bias: token id to an additive bias in [-100, 100], where -100 forbids and 100 forces in practice.
    speculative_config: how this request drafts, over the engine's settings: {"method": "window", "num_speculative_tokens": 4}.
    structured_outputs: what the output must match, a StructuredOutputsParams or a mapping of its fields. reasoning_end_str:
    text such as "</think>" up to which the model reasons; structured_outputs holds for what comes after it.
    thinking_token_budget: output tokens after which reasoning_end_str is forced, if it has not come.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    speculative_config: dict[str, Any] | None = None
    reasoning_end_str: str | None = None
    thinking_token_budget: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stop_strings: list[str] = field(init=False, repr=False, default_factory=list)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown key is an error that lists the known ones."""
        known = {f.name for f in fields(cls) if f.init}
        for key, value in values.items():
            if key not in known:
                raise UnknownFieldError(key, value, "not a sampling parameter", f"Known: {', '.join(sorted(known))}")
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, 16384)
        self._check_shape()
        self._check_penalties()
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None,
                     "Give max_tokens of at least 1, or None to run to the model's limit")
            if self.min_tokens > self.max_tokens:
                raise InvalidValueError("min_tokens", self.min_tokens, f"more than max_tokens={self.max_tokens}",
                                        "Lower min_tokens or raise max_tokens")
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.speculative_config is not None and not isinstance(self.speculative_config, dict):
            raise InvalidValueError("speculative_config", self.speculative_config, "not a mapping",
                                    'Give a dict, such as {"method": "window"}')
        self._check_stop()
        self._check_tokens()
        self._check_structure()

    def _check_shape(self) -> None:
        self.temperature = _real("temperature", self.temperature)
        if self.temperature < 0:
            raise InvalidValueError("temperature", self.temperature, "negative", "Give 0 for greedy, or a positive value")
        if self.temperature > _MAX_TEMPERATURE:
            raise InvalidValueError("temperature", self.temperature, f"above {_MAX_TEMPERATURE:g}", "Give a smaller value")
        self.top_p = _real("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise InvalidValueError("top_p", self.top_p, "outside (0, 1]", "Give 1.0 to keep all tokens")
        if self.top_k == -1:
            self.top_k = 0
        _integer("top_k", self.top_k, 0, None, "Give 0 or -1 to keep all tokens, or a positive count")
        self.min_p = _real("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise InvalidValueError("min_p", self.min_p, "outside [0, 1]", "Give 0.0 to switch it off")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = _real(name, getattr(self, name))
            setattr(self, name, value)
            if not -2 <= value <= 2:
                raise InvalidValueError(name, value, "outside [-2, 2]", "Give 0.0 to switch it off")
        self.repetition_penalty = _real("repetition_penalty", self.repetition_penalty)
        if not 1 / _MAX_REPETITION <= self.repetition_penalty <= _MAX_REPETITION:
            raise InvalidValueError("repetition_penalty", self.repetition_penalty,
                                    f"outside [{1 / _MAX_REPETITION:g}, {_MAX_REPETITION:g}]", "Give 1.0 to switch it off")

    def _check_stop(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        for s in stop:
            if not isinstance(s, str) or not s:
                raise InvalidValueError("stop", self.stop, "holds an empty or non-string entry", "Give non-empty strings")
        if stop and not self.detokenize:
            raise InvalidValueError("detokenize", False, "stop strings need text", "Set detokenize=True or use stop_token_ids")
        self.stop_strings = stop

    def _check_tokens(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids is None:
                continue
            if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                raise InvalidValueError(name, ids, "holds something that is not a token id", "Give non-negative integers")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidValueError("allowed_token_ids", [], "allows nothing", "Give at least one id, or None for all")
        if self.logit_bias is not None:
            try:
                bias = {int(k): _real("logit_bias", v) for k, v in self.logit_bias.items()}
            except (TypeError, ValueError, AttributeError) as e:
                raise InvalidValueError("logit_bias", self.logit_bias, "not a map of token id to number",
                                        "Give {token_id: bias}") from e
            if any(k < 0 or not -100 <= v <= 100 for k, v in bias.items()):
                raise InvalidValueError("logit_bias", self.logit_bias, "an id below 0 or a bias outside [-100, 100]",
                                        "Clamp the biases")
            self.logit_bias = bias
        for word in self.bad_words or []:
            if not isinstance(word, str) or not word:
                raise InvalidValueError("bad_words", self.bad_words, "holds an empty or non-string entry",
                                        "Give non-empty strings")

    def _check_structure(self) -> None:
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.from_any(self.structured_outputs)
        end = self.reasoning_end_str
        if end is not None and (not isinstance(end, str) or not end):
            raise InvalidValueError("reasoning_end_str", end, "not text, or empty", 'Give for example "</think>"')
        if self.thinking_token_budget is not None:
            _integer("thinking_token_budget", self.thinking_token_budget, 0)
            if end is None:
                raise InvalidValueError("thinking_token_budget", self.thinking_token_budget, "nothing says how reasoning ends",
                                        "Set reasoning_end_str, to </think> for most models")
