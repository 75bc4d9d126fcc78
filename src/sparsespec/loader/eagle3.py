"""Loads EAGLE-3 draft heads in the public checkpoint format (SafeAILab/EAGLE, AngelSlim/Qwen3-*_eagle3).

A directory or hub name with config.json (of a one-layer Llama, and `draft_vocab_size`) and weights in safetensors or in
pytorch_model.bin: `fc`, `midlayer.*`, `norm`, `lm_head`, the maps `d2t` (target id = draft id + d2t[draft id]) and `t2d`
(whether the head knows a target's token), and `embed_tokens` where it is not the target's.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsespec.core.errors import InvalidValueError, ModelLoadError
from sparsespec.loader.loaded import LoadedModel
from sparsespec.loader.safetensors import HFDirectory, find_model, read_json
from sparsespec.loader.weights import load_weights
from sparsespec.models.eagle3 import Eagle3Head

_FIELD = "speculative_config.model"
_PICKLED = "pytorch_model.bin"


def load_eagle3(name: str | None, loaded: LoadedModel) -> Eagle3Head:
    """The head that `name` points to, for this target. Raises InvalidValueError where none is named, and ModelLoadError for
    one that is missing, broken, incomplete, of another kind or made for another target."""
    if name is None:
        raise InvalidValueError(_FIELD, None, "EAGLE-3 needs a draft head", "Give its directory or hub name")
    try:
        return _load(find_model(name, also=(_PICKLED,)), loaded)
    except ModelLoadError as e:
        raise ModelLoadError(_FIELD, e.value, e.problem, e.remedy) from e


def _load(path: Path, loaded: LoadedModel) -> Eagle3Head:
    source, where = HFDirectory(path), str(path)
    settings, target = read_json(path / "config.json"), loaded.config
    size = settings.get("draft_vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ModelLoadError("model", where, "its config has no draft_vocab_size", "Name an EAGLE-3 draft head")
    for key, wanted in (("vocab_size", target.vocab_size), ("target_hidden_size", target.hidden_size)):
        if settings.get(key, wanted) != wanted:
            raise ModelLoadError("model", where, f"its {key} is {settings[key]}, the target's is {wanted}",
                                 "Use the head that was trained for this model")
    pickled = path / _PICKLED
    pairs = list(_pickled(pickled) if pickled.is_file() and not any(path.glob("model.safetensors*")) else source.pairs())
    maps = {key: tensor for key, tensor in pairs if key in ("d2t", "t2d")}
    names = {key for key, _ in pairs}
    ids = _target_ids(maps, size, target.vocab_size, where)
    own_embedding, own_output = "embed_tokens.weight" in names, "lm_head.weight" in names
    if not own_embedding and source.config.hidden_size != target.hidden_size:
        raise ModelLoadError("model", where, "it has no embed_tokens, and the target's has another width",
                             "Use a complete checkpoint")
    if not own_output and size != target.vocab_size:
        raise ModelLoadError("model", where, "it has no lm_head, and a vocabulary of its own", "Use a complete checkpoint")
    head = Eagle3Head(source.config, loaded.model, feature_layers(settings, target.num_layers, where), ids,
                      own_embedding=own_embedding, own_output=own_output,
                      norm_before_residual=bool(settings.get("norm_before_residual", False)))
    load_weights(head, ((key, tensor) for key, tensor in pairs if key not in maps), where)
    head.finalize()
    return head


def _pickled(path: Path) -> Iterable[tuple[str, Tensor]]:
    """Tensors of a pickled state dict; nothing else is unpickled."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # pickle's, zip's and torch's own kinds
        raise ModelLoadError("model", str(path), f"not a complete PyTorch file of tensors ({type(e).__name__})",
                             "Download it again, or convert it to safetensors") from e
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ModelLoadError("model", str(path), "holds something else than named tensors", "Use a checkpoint in safetensors")
    return tensors.items()


def feature_layers(settings: dict[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
    """Layers of the target whose inputs the head reads: low, middle and high, 2, n // 2 and n - 3, as EAGLE's own code.

    A config may name others: `eagle_aux_hidden_state_layer_ids` counts inputs, in `eagle_config` it counts outputs (public
    code reads them so). Models of a few layers are clamped into their range; a layer may then be read more than once.
    """
    nested = settings.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    own = settings.get(key) or [i + 1 for i in nested.get(key) or ()]
    if own and (len(own) != 3 or not all(isinstance(i, int) and 0 <= i < num_layers for i in own)):
        raise ModelLoadError("model", where, f"its {key} is {own}, of a target with {num_layers} layers",
                             "Use the head that was trained for this model")
    return tuple(own) or tuple(min(max(i, 0), num_layers - 1) for i in (2, num_layers // 2, num_layers - 3))


def _target_ids(maps: dict[str, Tensor], size: int, vocab_size: int, where: str) -> Tensor:
    """Target ids int64 [size] of the draft vocabulary. Raises ModelLoadError for maps that are missing or contradict."""
    if "d2t" not in maps:
        if size != vocab_size:
            raise ModelLoadError("model", where, "1 of its tensors is missing: d2t", "Use a complete checkpoint")
        return torch.arange(size)
    for key, length in (("d2t", size), ("t2d", vocab_size)):
        if key in maps and maps[key].shape != (length,):
            shape = tuple(maps[key].shape)
            raise ModelLoadError("model", where, f"tensor {key} has shape {shape}, the config asks for {(length,)}",
                                 "Check that config and weights belong together")
    ids = torch.arange(size) + maps["d2t"].long()
    known = torch.zeros(vocab_size, dtype=torch.bool)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ModelLoadError("model", where, f"d2t points outside the target's {vocab_size} tokens", "Download it again")
    known[ids] = True
    if int(known.sum()) != size or ("t2d" in maps and bool((maps["t2d"].bool() != known).any())):
        raise ModelLoadError("model", where, "d2t and t2d are not the two directions of one map", "Download it again")
    return ids
