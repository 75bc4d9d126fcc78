"""The small endpoints."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictInt

from sparsespec.server.protocol.chat import Message
from sparsespec.server.protocol.common import Body, Tool


class TokenizeRequest(Body):
    """Text in `prompt`, or a conversation in `messages`, which goes through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: StrictBool = False


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[StrictInt]


class DetokenizeResponse(BaseModel):
    prompt: str


class AbortRequest(Body):
    """request_id: the response's id, or the request_id that the request brought; or abort_all."""

    request_id: str | None = Field(default=None, max_length=256)
    abort_all: StrictBool = False


class AbortResponse(BaseModel):
    """aborted: ids of the responses that end now, with what they have."""

    aborted: list[str]


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Version(BaseModel):
    version: str


class Health(BaseModel):
    """status: ok, draining (no new requests are taken) or dead (the engine failed for good)."""

    status: Literal["ok", "draining", "dead"]
    detail: str | None = None
