"""Hugging Face directories: config.json, safetensors weights in one file or in shards, tensors streamed one at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsespec.config.model import ModelConfig
from sparsespec.core.errors import ModelLoadError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt"]
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def find_model(name: str, also: tuple[str, ...] = ()) -> Path:
    """The path of a model: a local one, or a hub name's snapshot (`also`: further files of it). Raises ModelLoadError if there
    is neither."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not _HUB_NAME.fullmatch(name):
        raise ModelLoadError("model", name, "no such file or directory",
                             "Give a Hugging Face directory, a GGUF file or a hub name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[*_WANTED, *also]))
    except Exception as e:  # requests, httpx, OSError and the hub's own kinds, by version
        raise ModelLoadError("model", name, f"no such path, and the hub did not give it ({type(e).__name__}: {e})",
                             "Give the path of a local copy, or check the name and the network") from e


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelLoadError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelLoadError("model", str(path), f"not readable as JSON ({e})", "Download it again") from e
    if not isinstance(value, dict):
        raise ModelLoadError("model", str(path), "holds no JSON object", "Download it again")
    return value


class HFDirectory:
    """A Hugging Face directory. Raises ModelLoadError for a config that is missing, broken or of a quantised model."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)
        config = path / "config.json"
        if not config.is_file():
            raise ModelLoadError("model", str(path), "it has no config.json",
                                 "Point to a complete Hugging Face model or a GGUF file")
        hf = read_json(config)
        if hf.get("quantization_config"):
            raise ModelLoadError("model", str(config), "its weights are quantised, which is not supported in safetensors",
                                 "Use the unquantised model or a GGUF file")
        try:
            self.config = ModelConfig.from_hf(hf, str(config))
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
            if isinstance(e, ModelLoadError):
                raise
            raise ModelLoadError("model", str(config), f"a value is not of the right kind ({e})", "Check the config") from e

    def extra_eos(self) -> tuple[int, ...]:
        """End tokens that generation_config.json names."""
        path = self.path / "generation_config.json"
        ids = read_json(path).get("eos_token_id") if path.is_file() else None
        return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)

    def _files(self) -> list[Path]:
        index = self.path / _INDEX
        if not index.is_file():
            if (self.path / _SINGLE).is_file():
                return [self.path / _SINGLE]
            raise ModelLoadError("model", str(self.path), f"it has neither {_SINGLE} nor {_INDEX}",
                                 "Use a model with safetensors weights; convert others with transformers' save_pretrained")
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelLoadError("model", str(index), "it has no weight_map", "Download it again")
        files = [self.path / name for name in sorted(set(names.values()))]
        for file in files:
            if not file.is_file():
                raise ModelLoadError("model", str(index), f"it names {file.name}, which is not there",
                                 "Download the missing file")
        return files

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), one at a time. Raises ModelLoadError for a file that is missing, cut short or not safetensors."""
        from safetensors import SafetensorError, safe_open

        for file in self._files():
            try:
                with safe_open(str(file), framework="pt", device="cpu") as f:
                    for name in f.keys():  # noqa: SIM118 - not a mapping
                        yield name, f.get_tensor(name)
            except (SafetensorError, OSError) as e:
                raise ModelLoadError("model", str(file), f"not a complete safetensors file ({e})", "Download it again") from e
