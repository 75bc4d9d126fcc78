"""Tokenizers: transformers' own for a directory, and a quick way to the same for a GGUF file.

Importing AutoTokenizer and reading a GGUF vocabulary by it takes most of ten seconds. Here the vocabulary comes from the
open file and goes through transformers' converter directly, so text is split as transformers splits it. What
transformers does not take over from the file is added: the end token as the file names it, user-defined tokens, BOS.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsespec.core.errors import ModelLoadError

if TYPE_CHECKING:
    from sparsespec.loader.gguf import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
_REMEDY = "Give tokenizer= a directory that has one, or set skip_tokenizer_init=True and use token ids"


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds a tokenizer in a form that transformers knows."""
    return any((directory / name).is_file() for name in _FILES)


def directory_tokenizer(directory: Path) -> Any:
    """The tokenizer of a Hugging Face directory. Raises ModelLoadError if it has none or a broken one."""
    if not has_tokenizer(directory):
        raise ModelLoadError("tokenizer", str(directory), "there is no tokenizer", _REMEDY)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as e:  # tokenizers raises bare Exception
        raise ModelLoadError("tokenizer", str(directory), f"not readable ({type(e).__name__}: {e})", _REMEDY) from e


def gguf_tokenizer(file: GGUFFile) -> Any:
    """The tokenizer in a GGUF file's metadata. Raises ModelLoadError if there is none or of a kind that is not supported."""
    tokens, merges = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.merges")
    if not tokens or not merges or file.get("tokenizer.ggml.model") != "gpt2":
        raise ModelLoadError("tokenizer", file.where, f"its tokenizer is of kind {file.get('tokenizer.ggml.model')!r}, "
                             "only byte-level BPE ('gpt2') with its merges is supported", _REMEDY)
    from tokenizers import decoders
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.ggml import convert_gguf_tokenizer

    types = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    special = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in (
        ("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))}
    fields = {"tokenizer_type": "gpt2", "tokens": tokens, "merges": merges, "token_type": types,
              "bos_token_id": special["bos_token"], "eos_token_id": special["eos_token"],
              "unk_token_id": special["unk_token"],
              "add_prefix_space": bool(file.get("tokenizer.ggml.add_space_prefix", False))}
    try:
        backend, _ = convert_gguf_tokenizer(file.architecture, fields)
        backend.decoder = decoders.ByteLevel()  # the converted one gives raw bytes once an added token is not byte-level
        _add_declared(backend, tokens, types)
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=file.get("tokenizer.chat_template"), clean_up_tokenization_spaces=False,
            add_bos_token=bool(file.get("tokenizer.ggml.add_bos_token", False)),
            add_eos_token=bool(file.get("tokenizer.ggml.add_eos_token", False)),
            **{name: None if i is None else tokens[i] for name, i in special.items()})
    except Exception as e:  # tokenizers raises bare Exception
        raise ModelLoadError("tokenizer", file.where, f"its tokenizer is not usable ({type(e).__name__}: {e})", _REMEDY) from e


def _add_declared(backend: Any, tokens: list[str], types: list[int]) -> None:
    """Make every control and user-defined token of the file one that is matched whole in text; some are left out else."""
    from tokenizers import AddedToken

    known = {t.content for t in backend.get_added_tokens_decoder().values()}
    for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        declared = [t for t, k in zip(tokens, types, strict=True) if k == kind and t not in known]
        add([AddedToken(t, normalized=False, special=kind == _CONTROL) for t in declared])
