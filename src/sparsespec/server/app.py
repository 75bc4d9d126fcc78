"""The application: endpoints, what stands before them, and the engine's life around them.

    app = create_app(Engine(config), ServerConfig(api_key=["secret"]))
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from sparsespec.config.server import ServerConfig
from sparsespec.engine.async_engine import AsyncEngine
from sparsespec.engine.engine import Engine
from sparsespec.metrics.log_line import LogLine
from sparsespec.metrics.prometheus import ServerMetrics
from sparsespec.server.defaults import sampling_defaults
from sparsespec.server.errors import add_handlers
from sparsespec.server.guard import LimitBody, RequireKey
from sparsespec.server.render import Renderer
from sparsespec.server.routes import abort, chat, completions, dashboard, models, status, tokens
from sparsespec.server.service import Service
from sparsespec.server.token_text import TokenText

log = logging.getLogger(__name__)

KEY_VARIABLE = "SPARSESPEC_API_KEY"


def create_app(engine: Engine, config: ServerConfig | None = None, *, make_engine: Callable[[], Engine] | None = None) -> FastAPI:
    """The ASGI application around an engine, which nobody else may use from then on; its loop starts with the app's lifespan.

    make_engine: sets up the engine's successor after a crash; None: the same configuration over the same weights.
    `app.state.service` holds what the endpoints share. Raises InvalidValueError for files that are named but not usable.
    """
    config = config or ServerConfig()
    service = _service(engine, config, make_engine)
    app = FastAPI(title="sparsespec", root_path=config.root_path, lifespan=_lifespan, redoc_url=None)
    app.state.service = service
    for module in (chat, completions, models, status, tokens, abort, dashboard):
        app.include_router(module.router)
    add_handlers(app)
    keys = [*(config.api_key or ()), *filter(None, [os.environ.get(KEY_VARIABLE)])]
    app.add_middleware(LimitBody, max_bytes=int(config.max_body_mib * 2**20))
    app.add_middleware(RequireKey, keys=keys)
    if config.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(config.allowed_origins), allow_methods=["*"], allow_headers=["*"])
    return app


def _service(engine: Engine, config: ServerConfig, make_engine: Callable[[], Engine] | None) -> Service:
    names = list(config.served_model_name or [_short(engine.loaded.name)])
    front = AsyncEngine(engine, max_waiting=config.max_waiting_requests, request_timeout=config.request_timeout,
                        make_engine=make_engine)
    metrics = ServerMetrics(front.stats, names[0])
    front.observer = metrics
    renderer = Renderer(engine.loaded.tokenizer, engine.max_model_len, config.chat_template)
    return Service(front, config, renderer, TokenText(engine.loaded.tokenizer), metrics, names,
                   sampling_defaults(config.generation_config, engine.loaded.name))


def _short(name: str) -> str:
    """A model's name: as it was given, but of a path that exists its last part."""
    path = Path(name)
    return path.resolve().name if path.exists() else name


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    service: Service = app.state.service
    service.engine.start()
    logger = asyncio.create_task(_log_lines(service)) if service.config.log_interval else None
    try:
        yield
    finally:
        if logger is not None:
            logger.cancel()
        await service.engine.close()
        service.renderer.close()


async def _log_lines(service: Service) -> None:
    line = LogLine(service.engine.stats)
    while True:
        await asyncio.sleep(service.config.log_interval)
        if (text := line.next()) is not None:
            log.info("%s", text)
