"""Dequantisation, bit for bit against the gguf package's NumPy code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from sparsespec.loader import dequant
from sparsespec.loader.dequant import SUPPORTED, dequantize

# kind: (block bytes, where its float16 scales are)
LAYOUT = {"Q4_0": (18, (0,)), "Q4_1": (20, (0, 2)), "Q5_0": (22, (0,)), "Q5_1": (24, (0, 2)), "Q8_0": (34, (0,)),
          "Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}


def random_blocks(kind: str, rows: int, blocks: int, seed: int) -> np.ndarray[Any, Any]:
    """Random bytes [rows, blocks · block bytes] whose scales are finite: of both signs, zero and subnormal too."""
    rng = np.random.default_rng(seed)
    size, scales = LAYOUT[kind]
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in scales:
        values = (rng.standard_normal((rows, blocks, 1)) * 0.02).astype(np.float16)
        values[0, 0], values[-1, -1] = 0, 6e-8
        raw[:, :, at:at + 2] = values.view(np.uint8)
    return raw.reshape(rows, -1)


def reference(raw: np.ndarray[Any, Any], kind: str) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", LAYOUT)
def test_random_blocks(kind: str) -> None:
    raw = random_blocks(kind, 37, 5, seed=1)
    got, want = dequantize(torch.from_numpy(raw), kind), reference(raw, kind)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
    assert got.unique().numel() > 100


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_values(kind: str) -> None:
    """What the package quantised comes back near to what went in."""
    values = np.random.default_rng(2).standard_normal((16, 96)).astype(np.float32)
    raw = quants.quantize(values, GGMLQuantizationType[kind])
    got = dequantize(torch.from_numpy(raw), kind)
    assert torch.equal(got, reference(raw, kind))
    assert (got - torch.from_numpy(values)).abs().max() < (0.05 if kind == "Q8_0" else 0.5)


@pytest.mark.parametrize("kind", LAYOUT)
def test_chunks_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(random_blocks(kind, 7, 3, seed=3))
    whole = dequantize(raw, kind)
    monkeypatch.setattr(dequant, "CHUNK", 1024)
    assert torch.equal(dequantize(raw, kind), whole)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_plain_types(kind: str, dtype: torch.dtype) -> None:
    values = torch.randn(3, 8).to(dtype)
    got = dequantize(values.view(torch.uint8), kind)
    assert got.dtype == dtype
    assert torch.equal(got, values)
    assert torch.equal(got.float(), reference(values.view(torch.uint8).numpy(), kind))


def test_every_supported_type_is_tested() -> None:
    assert set(SUPPORTED) == {*LAYOUT, "F32", "F16", "BF16"}
