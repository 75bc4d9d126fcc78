"""The engine's settings: one frozen dataclass a concern, composed in EngineConfig. Names are vLLM's where it has one."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from sparsespec.config.fields import check_choices, check_range, from_dict, option
from sparsespec.config.speculative import SpeculativeConfig
from sparsespec.core.errors import UnknownFieldError


@dataclass(frozen=True)
class LoadConfig:
    """Where the weights come from and how they are held."""

    model: str | None = option(None, "HF directory, GGUF file or hub name; none: the embedded SmolLM2-135M-Instruct", cli=False)
    tokenizer: str | None = option(None, "tokenizer directory, if not the model's own")
    dtype: str = option("auto", "weights and KV; auto: the model's on a GPU, float32 on a CPU",
                        choices=("auto", "float32", "bfloat16", "float16"))
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    load_format: str = option("auto", "auto, or dummy for random weights", choices=("auto", "safetensors", "gguf", "dummy"))
    skip_tokenizer_init: bool = option(False, "take and give token ids only")
    max_model_len: int | None = option(None, "most tokens of prompt and output together; none: the model's limit")
    seed: int = option(0, "seeds requests that bring no seed of their own")

    def __post_init__(self) -> None:
        check_choices(self)
        if self.max_model_len is not None:
            check_range("max_model_len", self.max_model_len, 2)
        check_range("seed", self.seed, 0)


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache, on the device and on the host."""

    gpu_memory_utilization: float = option(0.92, "share of the GPU's memory that the engine may use")
    kv_cache_tokens: int | None = option(None, "size of the device pool in tokens; none: what the memory allows")
    kv_offloading_size: float | None = option(None, "GiB of host memory for swapped KV; none: no host pool")
    page_size: int = option(16, "tokens a page; selection works on single tokens whatever it is")
    enable_prefix_caching: bool = option(True, "keep committed KV for prompts that begin alike")

    def __post_init__(self) -> None:
        check_range("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0, integer=False)
        if self.kv_cache_tokens is not None:
            check_range("kv_cache_tokens", self.kv_cache_tokens, 1)
        if self.kv_offloading_size is not None:
            check_range("kv_offloading_size", self.kv_offloading_size, 0, integer=False)
        check_range("page_size", self.page_size, 1, 1024)


@dataclass(frozen=True)
class SchedulerConfig:
    """How much one iteration carries."""

    max_num_seqs: int = option(256, "requests that run at once")
    max_num_batched_tokens: int | None = option(None, "rows of one iteration; none: 2048, or 512 on a CPU")

    def __post_init__(self) -> None:
        check_range("max_num_seqs", self.max_num_seqs, 1)
        if self.max_num_batched_tokens is not None:
            check_range("max_num_batched_tokens", self.max_num_batched_tokens, 1)


@dataclass(frozen=True)
class ParallelConfig:
    """How many devices share the model."""

    tensor_parallel_size: int = option(1, "GPUs that share each layer")

    def __post_init__(self) -> None:
        check_range("tensor_parallel_size", self.tensor_parallel_size, 1)


@dataclass(frozen=True)
class RunnerConfig:
    """How a step is executed."""

    enforce_eager: bool = option(False, "no CUDA graphs")
    deterministic: bool = option(False, "bitwise equal results for a request whatever else is in the batch; slower")
    attention_backend: str = option("auto", "auto, or a name of the attention registry")
    logprobs_mode: str = option("raw_logprobs", "before or after temperature, penalties and truncation",
                                choices=("raw_logprobs", "processed_logprobs"))

    def __post_init__(self) -> None:
        check_choices(self)


_PARTS: dict[str, Any] = {"load": LoadConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig,
          "runner": RunnerConfig}


@dataclass(frozen=True)
class EngineConfig:
    """All of it. `from_kwargs` takes the flat names of the public API and of the command line."""

    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    @classmethod
    def from_kwargs(cls, *, speculative_config: dict[str, Any] | None = None, **kwargs: Any) -> EngineConfig:
        """Sort flat settings into their parts. An unknown name raises UnknownFieldError that lists the known ones."""
        owner = {name: part for part, c in _PARTS.items() for name in (f.name for f in fields(c))}
        values: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
        for name, value in kwargs.items():
            if name not in owner:
                raise UnknownFieldError(name, value, "not an engine setting", f"Known: {', '.join(sorted(owner))}")
            values[owner[name]][name] = value
        parts: dict[str, Any] = {part: from_dict(c, values[part], part) for part, c in _PARTS.items()}
        return cls(speculative=SpeculativeConfig.from_dict(speculative_config), **parts)
