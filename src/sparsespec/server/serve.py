"""Runs the application under uvicorn, with a shutdown that lets running requests end.

On SIGTERM or SIGINT the server takes no more connections, gives what runs `drain_timeout` seconds, ends the rest with what
it has (finish_reason "abort", stop_reason "shutdown"), and leaves. A second SIGINT leaves at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

import uvicorn
from fastapi import FastAPI

from sparsespec.config.server import ServerConfig
from sparsespec.server.service import Service

log = logging.getLogger(__name__)

_KEEP_ALIVE = 75  # seconds of an idle connection: longer than clients and proxies keep one, so that it is they who close it
_WRITE_REST = 5  # seconds that clients have to read the end of aborted responses


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which tells the engine to drain before it waits for connections to end."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.create_task(self.service.engine.drain(self.service.config.drain_timeout))
        await asyncio.sleep(0)  # from here on nothing new is taken
        await super().shutdown(sockets)
        await drain


def make_server(app: FastAPI, config: ServerConfig) -> DrainingServer:
    """The server, not yet running. Logging is the caller's."""
    settings = uvicorn.Config(
        app, host=config.host, port=config.port, log_config=None, log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log, ssl_keyfile=config.ssl_keyfile, ssl_certfile=config.ssl_certfile,
        timeout_keep_alive=_KEEP_ALIVE, timeout_graceful_shutdown=int(config.drain_timeout) + _WRITE_REST, ws="none")
    return DrainingServer(settings, app.state.service)


def run_server(app: FastAPI, config: ServerConfig) -> None:
    """Serve until told to stop. SIGTERM is an orderly end."""
    server = make_server(app, config)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when it is done
    server.run()
