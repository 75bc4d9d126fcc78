"""Prompts from arguments, files and stdin, and the chat template around them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsespec.core.errors import InvalidValueError

if TYPE_CHECKING:
    from sparsespec.llm import LLM

Prompt = str | dict[str, Any]  # text, {"prompt_token_ids": [...]} or {"messages": [...]}
_KEYS = ("prompt", "prompt_token_ids", "messages")


def read_prompts(arguments: list[str], input_file: str | None) -> list[Prompt]:
    """Arguments and file, in this order; with neither, all of stdin is one prompt. Raises InvalidValueError for none at all."""
    prompts: list[Prompt] = list(arguments)
    if input_file is not None:
        prompts += _from_file(input_file)
    elif not prompts and not sys.stdin.isatty():
        text = sys.stdin.read().strip()
        prompts = [text] if text else []
    if not prompts:
        raise InvalidValueError("PROMPT", [], "no prompt given", "Give it as an argument, with --input-file, or on stdin")
    return prompts


def _from_file(name: str) -> list[Prompt]:
    try:
        lines = sys.stdin.read().splitlines() if name == "-" else Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidValueError("--input-file", name, f"cannot be read ({e})", "Give a UTF-8 file") from e
    if not name.endswith(".jsonl"):
        return [line for line in lines if line.strip()]
    return [_from_json(line, f"{name}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _from_json(line: str, where: str) -> Prompt:
    remedy = f"Give a JSON string, or an object with one of {', '.join(_KEYS)}"
    try:
        value = json.loads(line)
    except json.JSONDecodeError as e:
        raise InvalidValueError(where, line, f"not JSON ({e.msg})", remedy) from e
    if isinstance(value, str):
        return value
    keys = [k for k in _KEYS if isinstance(value, dict) and k in value]
    if len(keys) != 1:
        raise InvalidValueError(where, value, "no prompt, or more than one", remedy)
    return value["prompt"] if keys[0] == "prompt" else {keys[0]: value[keys[0]]}


def to_engine(llm: LLM, prompt: Prompt, chat: bool | None) -> Prompt:
    """One prompt as LLM.generate takes it. chat: None applies the template to text where the model has one."""
    if isinstance(prompt, dict) and "messages" in prompt:
        return llm.apply_chat_template(prompt["messages"])
    use = chat if chat is not None else bool(getattr(llm.get_tokenizer(), "chat_template", None))
    if isinstance(prompt, str) and use:
        return llm.apply_chat_template([{"role": "user", "content": prompt}])
    return prompt
