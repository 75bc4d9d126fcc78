"""/abort_request."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from sparsespec.core.errors import InvalidValueError
from sparsespec.server.protocol.misc import AbortRequest, AbortResponse
from sparsespec.server.service import KINDS, Served, Service, error_docs

router = APIRouter()


@router.post("/abort_request", responses=error_docs(400, 401, 413, 503))
async def abort_request(body: AbortRequest, service: Served) -> AbortResponse:
    """End responses early. Each is completed with what it has and finish_reason "abort". Unknown ids abort nothing."""
    if (body.request_id is None) != body.abort_all:
        raise InvalidValueError("request_id", body.request_id, "neither or both of request_id and abort_all are given",
                                "Give one of them")
    names = list(service.active) if body.abort_all else [f"{kind}{body.request_id}" for kind in ("", *KINDS)]
    wanted = {name: service.active[name] for name in names if name in service.active}
    results = await asyncio.gather(*(_abort(service, ids) for ids in wanted.values()))
    return AbortResponse(aborted=[name for name, ended in zip(wanted, results, strict=True) if ended])


async def _abort(service: Service, request_ids: list[str]) -> bool:
    """Whether any of one response's requests was still there."""
    return any(await asyncio.gather(*(service.engine.abort(i) for i in request_ids)))
