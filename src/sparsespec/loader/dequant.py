"""Dequantises GGUF blocks with torch. Bit-equal to the gguf package's NumPy code, which is several times slower.

A tensor comes as bytes, [rows, bytes of a row]; a row is a run of blocks. Each function below fills the values of n
blocks, [n, block size] in float32, from their bytes, [n, block bytes].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 1 << 20  # values at a time: the intermediates then stay in the cache and add nothing to the peak


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, [n, 1] in float32."""
    return blocks[:, start:start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Low nibbles of [n, groups, w] into out[:, :, 0], high ones into out[:, :, 1], with out [n, groups, 2, w]."""
    out[:, :, 0] = packed & 15
    out[:, :, 1] = packed >> 4


def _q4_0(b: Tensor, out: Tensor) -> None:
    _nibbles(b[:, None, 2:], out.view(-1, 1, 2, 16))
    out.sub_(8).mul_(_half(b, 0))


def _q4_1(b: Tensor, out: Tensor) -> None:
    _nibbles(b[:, None, 4:], out.view(-1, 1, 2, 16))
    out.mul_(_half(b, 0)).add_(_half(b, 2))


def _fifth_bits(packed: Tensor) -> Tensor:
    """Bits of [n, 4] bytes, the lowest first, each worth 16: [n, 32]."""
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)
    return ((bits & 1) << 4).flatten(1)


def _q5_0(b: Tensor, out: Tensor) -> None:
    _nibbles(b[:, None, 6:], out.view(-1, 1, 2, 16))
    out.add_(_fifth_bits(b[:, 2:6])).sub_(16).mul_(_half(b, 0))


def _q5_1(b: Tensor, out: Tensor) -> None:
    _nibbles(b[:, None, 8:], out.view(-1, 1, 2, 16))
    out.add_(_fifth_bits(b[:, 4:8])).mul_(_half(b, 0)).add_(_half(b, 2))


def _q8_0(b: Tensor, out: Tensor) -> None:
    out.copy_(b[:, 2:].view(torch.int8))
    out.mul_(_half(b, 0))


def _scale_min(b: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [n, 8, 1] of the K kinds: six bits each, packed in twelve bytes after d and dmin."""
    low, mid, high = b[:, 4:16].view(-1, 3, 4).unbind(1)
    scale = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), 1)
    minimum = torch.cat((mid & 63, (high >> 4) | ((mid >> 2) & 48)), 1)
    return (_half(b, 0) * scale.float()).unsqueeze(-1), (_half(b, 2) * minimum.float()).unsqueeze(-1)


def _q4_k(b: Tensor, out: Tensor) -> None:
    _nibbles(b[:, 16:].view(-1, 4, 32), out.view(-1, 4, 2, 32))
    scale, minimum = _scale_min(b)
    out.view(-1, 8, 32).mul_(scale).sub_(minimum)


def _q5_k(b: Tensor, out: Tensor) -> None:
    _nibbles(b[:, 48:].view(-1, 4, 32), out.view(-1, 4, 2, 32))
    bits = b[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]
    scale, minimum = _scale_min(b)
    out.view(-1, 8, 32).add_((bits & 1) << 4).mul_(scale).sub_(minimum)


def _q6_k(b: Tensor, out: Tensor) -> None:
    _nibbles(b[:, :128].view(-1, 2, 64), out.view(-1, 2, 2, 64))
    high = b[:, 128:192].view(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    out.view(-1, 2, 4, 32).add_((high & 3) << 4).sub_(32)
    scale = _half(b, 208) * b[:, 192:208].view(torch.int8).float()
    out.view(-1, 16, 16).mul_(scale.unsqueeze(-1))


# kind: (values of a block, its bytes, the function)
_KINDS: dict[str, tuple[int, int, Callable[[Tensor, Tensor], None]]] = {
    "Q4_0": (32, 18, _q4_0), "Q4_1": (32, 20, _q4_1), "Q5_0": (32, 22, _q5_0), "Q5_1": (32, 24, _q5_1), "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k), "Q5_K": (256, 176, _q5_k), "Q6_K": (256, 210, _q6_k),
}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SUPPORTED = (*_PLAIN, *_KINDS)


def dequantize(raw: Tensor, kind: str) -> Tensor:
    """Values of a tensor given as bytes, uint8 [..., bytes of a row]; `kind` is one of SUPPORTED.

    F32, F16 and BF16 come back as they are (a view), the others in float32.
    """
    if kind in _PLAIN:
        return raw.view(_PLAIN[kind])
    values, size, fill = _KINDS[kind]
    blocks = raw.reshape(-1, size)
    out = torch.empty(blocks.shape[0], values)
    step = CHUNK // values
    for start in range(0, blocks.shape[0], step):
        fill(blocks[start:start + step], out[start:start + step])
    return out.view(*raw.shape[:-1], -1)
