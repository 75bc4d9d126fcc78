"""/tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter

from sparsespec.core.errors import InvalidValueError
from sparsespec.server.protocol.misc import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from sparsespec.server.service import Served, error_docs

router = APIRouter()


@router.post("/tokenize", responses=error_docs(400, 401, 404, 413))
async def tokenize(body: TokenizeRequest, service: Served) -> TokenizeResponse:
    """Token ids of a text or of a conversation."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidValueError("prompt", body.prompt, "neither or both of prompt and messages are given", "Give one of them")
    if body.messages is not None:
        prompt = await service.renderer.chat(
            body.messages, tools=body.tools, add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message), template_kwargs=body.chat_template_kwargs)
    else:
        prompt = await service.renderer.text(body.prompt or "", body.add_special_tokens is not False)
    ids = prompt["prompt_token_ids"]
    strings = service.renderer.token_strings(ids) if body.return_token_strs else None
    return TokenizeResponse(count=len(ids), max_model_len=service.engine.max_model_len, tokens=ids, token_strs=strings)


@router.post("/detokenize", responses=error_docs(400, 401, 404, 413))
async def detokenize(body: DetokenizeRequest, service: Served) -> DetokenizeResponse:
    """Text of token ids."""
    service.check_model(body.model)
    return DetokenizeResponse(prompt=await service.renderer.detokenize(body.tokens))
