"""The fused row-wise kernels against the layers that they stand for."""

from __future__ import annotations

import kernel_env  # noqa: F401 (before the kernels)
import pytest
import torch
import torch.nn.functional as F

from sparsespec.config.model import ModelConfig
from sparsespec.kernels.elementwise import add_rms_norm, rms_norm, silu_mul
from sparsespec.kernels.rope import rope_and_write, write_kv
from sparsespec.layers.norm import RMSNorm
from sparsespec.layers.rope import RotaryEmbedding

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
DTYPES = [(torch.float32, 1e-6), (torch.float16, 2e-3)]


def _norm(size: int, dtype: torch.dtype, seed: int) -> RMSNorm:
    norm = RMSNorm(size, 1e-6, dtype=dtype, device=CPU)
    norm.weight.copy_(1 + 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(seed)))
    return norm


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("size", [64, 576, 1000])
def test_norm_and_residual(dtype: torch.dtype, tolerance: float, size: int) -> None:
    """The sum is the sum, and its norm the layer's."""
    generator = torch.Generator().manual_seed(size)
    x, delta = (torch.randn(5, size, generator=generator).to(dtype) for _ in range(2))
    norm = _norm(size, dtype, 1)
    torch.testing.assert_close(rms_norm(x, norm.weight, norm.eps), norm(x), rtol=tolerance, atol=tolerance)
    total, out = add_rms_norm(x, delta, norm.weight, norm.eps)
    assert torch.equal(total, x + delta)
    torch.testing.assert_close(out, norm(x + delta), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_silu_mul(dtype: torch.dtype, tolerance: float) -> None:
    """Rows longer than a block, and a tail."""
    x = 3 * torch.randn(3, 2 * 1500, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(silu_mul(x), F.silu(gate) * up, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "normed"), [(4, 2, 64, True), (9, 3, 96, False), (12, 12, 16, True)])
def test_rope_norm_and_write(dtype: torch.dtype, tolerance: float, adjacent: bool, heads: int, kv_heads: int, dim: int,
                             normed: bool) -> None:
    """q as the layers give it; k and v at their entries, and no other entry touched, in both layouts of the pool."""
    generator = torch.Generator().manual_seed(dim)
    config = ModelConfig("qwen3", 8, 8, 8, 1, heads, kv_heads, dim)
    rotary = RotaryEmbedding(config, 100, CPU)
    rows = 6
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    positions = torch.randint(0, 100, (rows,), generator=generator)
    entries = torch.randperm(20, generator=generator)[:rows]
    pool = torch.full((kv_heads, 20, 2, dim) if adjacent else (2, kv_heads, 20, dim), torch.nan, dtype=dtype)
    keys, values = pool.unbind(2) if adjacent else pool.unbind(0)
    q_norm, k_norm = (_norm(dim, dtype, seed) for seed in (1, 2))
    q = torch.full((rows, heads, dim), torch.nan, dtype=dtype)
    rope_and_write(qkv, q, keys, values, positions, entries, rotary.cos, rotary.sin,
                   (q_norm.weight, k_norm.weight) if normed else None, 1e-6)
    wanted_q, wanted_k, v = qkv.view(rows, -1, dim).split((heads, kv_heads, kv_heads), 1)
    if normed:
        wanted_q, wanted_k = q_norm(wanted_q), k_norm(wanted_k)
    wanted_q, wanted_k = rotary(wanted_q, wanted_k, positions)
    torch.testing.assert_close(q, wanted_q, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(keys[:, entries], wanted_k.transpose(0, 1), rtol=tolerance, atol=tolerance)
    assert torch.equal(values[:, entries], v.transpose(0, 1))
    rest = torch.ones(20, dtype=torch.bool).index_fill(0, entries, False)
    assert bool(keys[:, rest].isnan().all())
    assert bool(values[:, rest].isnan().all())


@pytest.mark.parametrize("adjacent", [False, True])
def test_write_takes_views(adjacent: bool) -> None:
    """k and v may be parts of a fused product."""
    qkv = torch.randn(5, 4 + 3 + 3, 16, generator=torch.Generator().manual_seed(0))
    _, k, v = qkv.split((4, 3, 3), 1)
    pool = torch.zeros((3, 9, 2, 16) if adjacent else (2, 3, 9, 16))
    keys, values = pool.unbind(2) if adjacent else pool.unbind(0)
    entries = torch.tensor([8, 0, 3, 5, 4])
    write_kv(k, v, keys, values, entries)
    assert torch.equal(keys[:, entries], k.transpose(0, 1))
    assert torch.equal(values[:, entries], v.transpose(0, 1))
