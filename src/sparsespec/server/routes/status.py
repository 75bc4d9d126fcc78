"""/health, /version, /metrics and /stats: for probes, monitoring and the live page. They never wait for the engine."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from sparsespec.server.encoding import json_bytes
from sparsespec.server.protocol.misc import Health, Version
from sparsespec.server.service import Served

router = APIRouter()


@router.get("/health", response_model=Health, responses={503: {"model": Health}})
async def health(service: Served) -> Response:
    """200 while requests are taken, 503 while the server drains and once the engine failed for good."""
    engine = service.engine
    body = {"status": engine.status, "detail": str(engine.failure) if engine.failure is not None else None}
    return Response(json_bytes(body), 200 if engine.status == "ok" else 503, media_type="application/json")


@router.get("/version")
async def show_version() -> Version:
    """The version of sparsespec."""
    return Version(version=version("sparsespec"))


@router.get("/metrics", response_class=Response)
async def metrics(service: Served) -> Response:
    """Metrics in Prometheus' text format; docs/metrics.md names them."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/stats")
async def stats(service: Served) -> dict[str, Any]:
    """The engine's counters and gauges: what LLM.stats() gives."""
    return service.engine.stats()
