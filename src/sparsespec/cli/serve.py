"""`sparsespec serve MODEL`: an OpenAI-compatible HTTP server.

sparsespec serve Qwen/Qwen3-8B --port 8000 --reasoning-parser qwen3
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from importlib.util import find_spec

from sparsespec.cli.flags import add_dataclass_flags, add_engine_flags, engine_kwargs
from sparsespec.config.engine import EngineConfig
from sparsespec.config.server import ServerConfig
from sparsespec.core.errors import InvalidValueError, UnsupportedError

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP, as OpenAI does", allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    add_dataclass_flags(parser.add_argument_group("server"), ServerConfig)
    add_engine_flags(parser)
    parser.set_defaults(command=run)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """ServerConfig from the flags that were given."""
    given = vars(args)
    return ServerConfig(**{f.name: given[f.name] for f in dataclasses.fields(ServerConfig) if f.name in given})


def run(args: argparse.Namespace) -> int:
    config, settings = server_config(args), engine_kwargs(args)
    if args.model_tag is not None and settings.setdefault("model", args.model_tag) != args.model_tag:
        raise InvalidValueError("--model", settings["model"], f"MODEL says {args.model_tag!r}", "Give one of them")
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UnsupportedError("serve", ", ".join(missing), "not installed", "Run: pip install 'sparsespec[server]'")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    engine_config = EngineConfig.from_kwargs(**settings)  # wrong settings are told before anything is loaded
    from sparsespec.engine.engine import Engine
    from sparsespec.server.app import create_app
    from sparsespec.server.serve import run_server

    app = create_app(Engine(engine_config), config)
    logging.getLogger(__name__).info("Serving %s", ", ".join(app.state.service.names))
    run_server(app, config)
    return 0
