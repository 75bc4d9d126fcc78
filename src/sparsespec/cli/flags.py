"""Command-line flags made from the configuration dataclasses, so that a setting has one definition and one help text."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any, get_args, get_origin, get_type_hints

from sparsespec.config import (
    CacheConfig,
    LoadConfig,
    ParallelConfig,
    RunnerConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from sparsespec.core.errors import InvalidValueError
from sparsespec.core.sampling_params import SamplingParams

PARTS = {"model": LoadConfig, "KV cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig,
         "execution": RunnerConfig}
_SPEC = "speculative_config"

SAMPLING_HELP = {
    "n": "completions a prompt",
    "temperature": "0 is greedy",
    "top_p": "keep the most likely tokens of this total probability",
    "top_k": "keep this many tokens; 0 keeps all",
    "min_p": "drop tokens below this share of the most likely one's probability",
    "max_tokens": "most tokens to generate; none: to the model's limit",
    "min_tokens": "no end before this many tokens",
    "stop": "end the text before this string; may be repeated",
    "stop_token_ids": "end after any of these token ids",
    "include_stop_str_in_output": "keep the stop string in the text",
    "ignore_eos": "go on after the end-of-text token",
    "presence_penalty": "penalty on tokens that occurred in the output",
    "frequency_penalty": "penalty a token by how often it occurred in the output",
    "repetition_penalty": "divides the logits of tokens seen; 1 is off",
    "logit_bias": 'JSON map of token id to bias, such as {"42": -100}',
    "bad_words": "string that must not be generated; may be repeated",
    "allowed_token_ids": "generate only these token ids",
    "logprobs": "log-probabilities of this many best tokens (shown with --json)",
    "prompt_logprobs": "the same for the prompt's tokens",
    "structured_outputs": 'JSON object that says what the output must match, such as {"regex": "[0-9]+"}',
    "reasoning_end_str": "text that ends reasoning, such as </think>; structured_outputs holds for what comes after it",
    "thinking_token_budget": "tokens of reasoning after which reasoning_end_str is forced",
    "detokenize": "make text from the tokens",
    "skip_special_tokens": "leave special tokens out of the text",
    "spaces_between_special_tokens": "put spaces between special tokens",
}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(convert: Callable[[str], Any], kind: str, optional: bool) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if optional and text.lower() == "none":
            return None
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from None

    return parse


_NUMBERS = {int: "an integer", float: "a number"}


def _add_field(group: argparse._ArgumentGroup, option: str, dest: str, *, hint: Any, help_text: str, default: Any,
               choices: Iterable[str] | None = None, several: bool = False) -> None:
    """One flag for one dataclass field. The default is suppressed: only what the user gave reaches the engine."""
    kinds = [t for t in (get_args(hint) or (hint,)) if t is not type(None)]
    shown = default if isinstance(default, str) else "none" if default is None else json.dumps(default)
    text = f"{help_text} (default: {shown})".replace("%", "%%")
    common: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": text}
    optional = type(None) in get_args(hint)
    if get_origin(hint) is tuple:
        kind = kinds[0]
        convert = _number(kind, _NUMBERS[kind], False) if kind in _NUMBERS else str
        group.add_argument(option, type=convert, nargs="+", metavar={int: "N", float: "X"}.get(kind, "NAME"), **common)
    elif kinds == [bool]:
        group.add_argument(option, action=argparse.BooleanOptionalAction, **common)
    elif kinds and kinds[0] in _NUMBERS:
        convert = _number(kinds[0], _NUMBERS[kinds[0]], optional)
        group.add_argument(option, type=convert, metavar="N" if kinds[0] is int else "X", **common)
    elif several:
        group.add_argument(option, action="extend", nargs="+", metavar="TEXT", **common)
    elif list[str] in kinds:
        group.add_argument(option, action="append", metavar="TEXT", **common)
    elif list[int] in kinds:
        group.add_argument(option, type=int, nargs="+", metavar="ID", **common)
    elif kinds == [str]:
        group.add_argument(option, choices=choices, metavar=None if choices else "TEXT", **common)
    else:
        group.add_argument(option, type=_json, metavar="JSON", **common)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {e}") from None


def add_dataclass_flags(group: argparse._ArgumentGroup, cls: type, prefix: str = "", dest_prefix: str = "") -> None:
    """A flag for every field of `cls` that has CLI metadata."""
    hints = get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if f.metadata.get("cli", True):
            option = f"--{prefix}{f.name}".replace("_", "-")
            _add_field(group, option, dest_prefix + f.name, hint=hints[f.name], help_text=f.metadata["help"],
                       default=f.default, choices=f.metadata.get("choices"), several=f.metadata.get("several", False))


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """--model, every engine setting, --speculative-config JSON and its dotted form."""
    for title, cls in PARTS.items():
        group = parser.add_argument_group(title)
        if cls is LoadConfig:
            help_text = {f.name: f.metadata["help"] for f in dataclasses.fields(cls)}["model"]
            group.add_argument("--model", metavar="MODEL", default=argparse.SUPPRESS, help=help_text)
        add_dataclass_flags(group, cls)
    group = parser.add_argument_group("speculation")
    group.add_argument(flag(_SPEC), type=_json, metavar="JSON", default=argparse.SUPPRESS,
                       help='the settings below as one JSON object, such as {"method": "none"}')
    add_dataclass_flags(group, SpeculativeConfig, f"{_SPEC}.", f"{_SPEC}.")


def engine_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for LLM from the flags that were given. Dotted flags win over the same key of the JSON object."""
    given = vars(args)
    names = {"model"} | {f.name for cls in PARTS.values() for f in dataclasses.fields(cls)}
    kwargs = {name: given[name] for name in names if name in given}
    spec = given.get(_SPEC)
    if spec is not None and not isinstance(spec, dict):
        raise InvalidValueError(flag(_SPEC), spec, "not a JSON object", """Give one such as '{"method": "none"}'""")
    spec = dict(spec or {})
    spec.update({dest.removeprefix(f"{_SPEC}."): value for dest, value in given.items() if dest.startswith(f"{_SPEC}.")})
    if spec:
        kwargs[_SPEC] = spec
    return kwargs


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """A flag for every field of SamplingParams; they appear as `sampling_…` in the namespace.

    max_tokens: this command's default, as the API's own (16) is short for a terminal.
    """
    group = parser.add_argument_group("sampling")
    hints = get_type_hints(SamplingParams)
    for f in dataclasses.fields(SamplingParams):
        if f.init and f.name not in ("seed", _SPEC):  # these two are the engine's: requests follow from it
            default = max_tokens if f.name == "max_tokens" else f.default
            _add_field(group, flag(f.name), "sampling_" + f.name, hint=hints[f.name], help_text=SAMPLING_HELP[f.name],
                       default=default)


def sampling_params(args: argparse.Namespace, *, max_tokens: int | None) -> SamplingParams:
    """SamplingParams from the flags that were given."""
    given = {dest.removeprefix("sampling_"): value for dest, value in vars(args).items() if dest.startswith("sampling_")}
    return SamplingParams(**{"max_tokens": max_tokens, **given})
