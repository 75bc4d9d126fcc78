"""A byte-level tokenizer small enough for random models: 256 bytes, a few longer tokens, an end token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparsespec.loader.loaded import LoadedModel

EOS = 256
EXTRA = ('</think>', '>{', '>x', '"a":', '12', 'k>')
"""Plain tokens of more than one character, with ids from 257 on."""

VOCAB = 288  # 25 ids are padding


def byte_tokenizer() -> Any:
    """Ids 0 to 255 are bytes; text is split into single bytes, so that longer tokens come from the model alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    vocab = {letters[b]: b for b in range(256)} | {"<eos>": EOS} | {text: EOS + 1 + i for i, text in enumerate(EXTRA)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False)


def with_tokenizer(loaded: LoadedModel, eos_token_ids: Sequence[int] = (EOS,)) -> LoadedModel:
    """The same weights with the byte-level tokenizer."""
    return replace(loaded, tokenizer=byte_tokenizer(), eos_token_ids=tuple(eos_token_ids))
