"""Configuration: frozen dataclasses, every field documented, unknown keys refused. The CLI is generated from them."""

from sparsespec.config.engine import (
    CacheConfig,
    EngineConfig,
    LoadConfig,
    ParallelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from sparsespec.config.model import ModelConfig
from sparsespec.config.server import ServerConfig
from sparsespec.config.speculative import SpeculativeConfig

__all__ = ["CacheConfig", "EngineConfig", "LoadConfig", "ModelConfig", "ParallelConfig", "RunnerConfig",
           "SchedulerConfig", "ServerConfig", "SpeculativeConfig"]
