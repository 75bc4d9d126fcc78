"""The HTTP server's settings. Names are vLLM's where it has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsespec.config.fields import check_choices, check_range, option
from sparsespec.core.errors import InvalidValueError

REASONING_PARSERS = ("qwen3", "deepseek_r1", "generic")
TOOL_PARSERS = ("hermes",)


@dataclass(frozen=True)
class ServerConfig:
    """How the server listens, whom it lets in, and what it bounds."""

    host: str = option("0.0.0.0", "address to listen on")
    port: int = option(8000, "port to listen on; 0: any free one")
    api_key: Sequence[str] | None = option(None, "keys of which requests must bring one; SPARSESPEC_API_KEY adds one", several=True)
    served_model_name: Sequence[str] | None = option(None, "names that requests call the model by; none: its own", several=True)
    chat_template: str | None = option(None, "Jinja chat template, or a file that holds one; none: the model's own")
    generation_config: str = option("auto", "sampling defaults: auto, the model's generation_config.json; none, OpenAI's; or a "
                                    "directory that holds one")
    reasoning_parser: str | None = option(None, "form of the model's reasoning, to be given apart from the answer",
                                          choices=REASONING_PARSERS)
    tool_call_parser: str | None = option(None, "form of the model's tool calls", choices=TOOL_PARSERS)
    enable_auto_tool_choice: bool = option(False, "let the model call tools by itself; needs --tool-call-parser")
    max_waiting_requests: int = option(1024, "completions that queue beyond those that run; more get 429")
    request_timeout: float | None = option(None, "seconds after which a request is ended with what it has; none: no limit")
    drain_timeout: float = option(30.0, "seconds that running requests have to end after SIGTERM")
    max_body_mib: float = option(8.0, "largest request body in MiB; larger ones get 413")
    max_prompts: int = option(256, "most prompts in one completions request")
    allowed_origins: Sequence[str] | None = option(None, "origins that browsers may call from (CORS); none: only the server's own",
                                               several=True)
    root_path: str = option("", "path under which a proxy offers the server")
    ssl_keyfile: str | None = option(None, "TLS key")
    ssl_certfile: str | None = option(None, "TLS certificate")
    uvicorn_log_level: str = option("info", "how much the HTTP side logs",
                                    choices=("critical", "error", "warning", "info", "debug", "trace"))
    disable_uvicorn_access_log: bool = option(False, "no log line a request")
    log_interval: float = option(10.0, "seconds between two lines about throughput and queues; 0: none")

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("port", self.port, 0, 65535)
        check_range("max_waiting_requests", self.max_waiting_requests, 0)
        if self.request_timeout is not None:
            check_range("request_timeout", self.request_timeout, 0.001, integer=False)
        check_range("drain_timeout", self.drain_timeout, 0, integer=False)
        check_range("max_body_mib", self.max_body_mib, 0.001, integer=False)
        check_range("max_prompts", self.max_prompts, 1)
        check_range("log_interval", self.log_interval, 0, integer=False)
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise InvalidValueError("enable_auto_tool_choice", True, "nothing finds tool calls",
                                    f"Set tool_call_parser to one of: {', '.join(TOOL_PARSERS)}")
