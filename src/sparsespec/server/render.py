"""Prompts of requests: chat template and tokenizer, in a thread of their own so that long prompts hold up nobody.

Templates run in Jinja's sandbox (transformers'); they are the model's or the operator's, never a request's. What they
make of a request is bounded: a prompt with more characters than the context could ever hold is refused unread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sparsespec.core.errors import ContextLengthError, InvalidValueError, SparseSpecError, UnsupportedError
from sparsespec.engine.detokenizer import make_decode
from sparsespec.server.protocol.chat import Message
from sparsespec.server.protocol.common import Tool

T = TypeVar("T")
Prompt = dict[str, Any]  # {"prompt": text or None, "prompt_token_ids": [...]}

# What the template gets from elsewhere, or what apply_chat_template itself takes.
_RESERVED = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "template_kwargs"})


class Renderer:
    """See the module. tokenizer: None serves token ids only. chat_template: text or a file's name; None: the tokenizer's own."""

    def __init__(self, tokenizer: Any | None, max_model_len: int, chat_template: str | None = None) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self._template = _template(chat_template)
        longest = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1
        self.max_chars = max_model_len * longest
        self._thread = ThreadPoolExecutor(1, "sparsespec-render")
        self._decode = make_decode(tokenizer, skip_special_tokens=False) if tokenizer is not None else None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None,
                   documents: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True,
                   continue_final_message: bool = False, template_kwargs: dict[str, Any] | None = None) -> Prompt:
        """The prompt of a conversation. Raises InvalidValueError where the template refuses it."""
        if self.tokenizer is None or not (self._template or self.tokenizer.chat_template):
            raise UnsupportedError("messages", "given", "the model has no chat template",
                                   "Use /v1/completions, or start the server with --chat-template")
        reserved = _RESERVED & set(template_kwargs or {})
        if reserved:
            raise InvalidValueError("chat_template_kwargs", sorted(reserved), "not the request's to set", "Leave them out")
        settings = {**(template_kwargs or {}), "tools": [t.model_dump(exclude_none=True) for t in tools] if tools else None,
                    "documents": documents, "continue_final_message": continue_final_message,
                    "add_generation_prompt": add_generation_prompt and not continue_final_message}
        return await self._run(lambda: self._chat(messages, settings))

    async def text(self, text: str, add_special_tokens: bool = True) -> Prompt:
        """The prompt of plain text."""
        if self.tokenizer is None:
            raise UnsupportedError("prompt", text, "the server has no tokenizer", "Give token ids")
        return await self._run(lambda: self._encode(text, add_special_tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included; empty without a tokenizer."""
        return self._decode(token_ids) if self._decode is not None else ""

    async def detokenize(self, token_ids: list[int]) -> str:
        """`decode` for ids from outside. Raises InvalidValueError for ids that are none, UnsupportedError without a tokenizer."""
        if self.tokenizer is None:
            raise UnsupportedError("tokens", token_ids, "the server has no tokenizer", "Decode them yourself")
        size = len(self.tokenizer)
        if not all(0 <= i < size for i in token_ids):
            raise InvalidValueError("tokens", token_ids, "holds something that is not a token id",
                                    f"Give integers from 0 to {size - 1}")
        return await self._run(lambda: self.decode(token_ids))

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Each id as the vocabulary writes it."""
        return [str(t) for t in self.tokenizer.convert_ids_to_tokens(token_ids)] if self.tokenizer is not None else []

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _chat(self, messages: Sequence[Message], settings: dict[str, Any]) -> Prompt:
        from jinja2.exceptions import TemplateError

        conversation = [_plain(m) for m in messages]
        tokenizer: Any = self.tokenizer
        try:
            text = tokenizer.apply_chat_template(conversation, tokenize=False, chat_template=self._template, **settings)
        except SparseSpecError:
            raise
        except (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as e:
            raise InvalidValueError("messages", conversation, f"the chat template refuses them ({e})",
                                    "Follow the order and the roles that the model knows") from e
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> Prompt:
        if len(text) > self.max_chars:
            raise ContextLengthError("prompt", f"{len(text)} characters",
                                     f"more than max_model_len={self.max_model_len} tokens can hold", "Shorten the prompt")
        try:
            ids = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]  # type: ignore[misc]
        except (TypeError, UnicodeEncodeError) as e:  # half a surrogate pair is no text
            raise InvalidValueError("prompt", text.encode("utf-8", "replace"), f"not text ({e})", "Give valid Unicode") from e
        return {"prompt": text, "prompt_token_ids": list(ids)}


def _template(given: str | None) -> str | None:
    """A template's text. Raises InvalidValueError for what is neither a file nor a template."""
    if given is None or "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidValueError("chat_template", given, f"not readable ({e})",
                                "Give a Jinja template, or a file that holds one") from e


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: content as text, arguments of tool calls as objects, no empty fields."""
    out = {name: value for name, value in message.model_dump(exclude_none=True).items() if name != "content"}
    if message.role == "developer":  # OpenAI's later name of it, which templates do not know
        out["role"] = "system"
    out["content"] = _text(message)
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        out["reasoning_content"] = reasoning
    for call in out.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            try:
                call["function"]["arguments"] = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as e:
                raise InvalidValueError("tool_calls", arguments, f"its arguments are not JSON ({e})", "Give a JSON object") from e
    return out


def _text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise UnsupportedError("content", part.type, "only text is understood", 'Give parts of type "text"')
    return "".join(part.text or "" for part in message.content)
