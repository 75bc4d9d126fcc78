"""load_weights accounts for every name on both sides."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from sparsespec.core.errors import ModelLoadError
from sparsespec.loader.dummy import fill_random
from sparsespec.loader.weights import load_weights

CPU = torch.device("cpu")


class Fake:
    """Two fused projections and a norm."""

    ignored_weights = (r"rotary_emb\.inv_freq$",)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.fused = torch.full((5, 4), torch.nan, dtype=dtype)
        self.norm = torch.full((4,), torch.nan, dtype=dtype)

    def weight_targets(self) -> dict[str, Tensor]:
        q, k = self.fused.split((3, 2))
        return {"q.weight": q, "k.weight": k, "norm.weight": self.norm}


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"q.weight": torch.randn(3, 4), "k.weight": torch.randn(2, 4), "norm.weight": torch.randn(4)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fills_views_and_converts(dtype: torch.dtype) -> None:
    model, given = Fake(dtype), tensors()
    load_weights(model, [*given.items(), ("model.layers.0.rotary_emb.inv_freq", torch.ones(2))], "here")
    assert torch.equal(model.fused, torch.cat((given["q.weight"], given["k.weight"])).to(dtype))
    assert torch.equal(model.norm, given["norm.weight"].to(dtype))


def refused(pairs: list[tuple[str, Tensor]], *parts: str) -> None:
    with pytest.raises(ModelLoadError) as e:
        load_weights(Fake(), pairs, "here.bin")
    for part in ("here.bin", *parts):
        assert part in str(e.value)


def test_refuses_what_does_not_fit() -> None:
    given = tensors()
    refused([*given.items(), ("q.weight", given["q.weight"])], "q.weight", "twice")
    refused([*(given | {"k.weight": torch.zeros(4, 2)}).items()], "k.weight", "(4, 2)", "(2, 4)")
    refused([*(given | {"k.weight": torch.zeros(2, 4, dtype=torch.int8)}).items()], "k.weight", "int8")
    refused([*(given | {"k.weight": torch.zeros(2, 4).to(torch.float8_e4m3fn)}).items()], "k.weight", "float8_e4m3fn")


def test_lists_unused_and_missing() -> None:
    extra = [(f"extra.{i}", torch.zeros(1)) for i in range(7)]
    refused([*tensors().items(), *extra], "7 tensors", "extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more")
    refused([*tensors().items(), ("lora.rotary_emb.inv_freq.scale", torch.zeros(1))], "lora.rotary_emb.inv_freq.scale")
    refused([("q.weight", tensors()["q.weight"])], "2 of 3 parameters", "k.weight, norm.weight")


def test_missing_lists_no_more_than_five() -> None:
    class Wide(Fake):
        def weight_targets(self) -> dict[str, Tensor]:
            return {f"w{i}": torch.empty(1) for i in range(9)}

    with pytest.raises(ModelLoadError, match=re.escape("w0, w1, w2, w3, w4 and 4 more")):
        load_weights(Wide(), [], "here")


def test_dummy_weights() -> None:
    first, again, other = Fake(), Fake(), Fake()
    for model, seed in ((first, 3), (again, 3), (other, 4)):
        fill_random(model.weight_targets(), seed, CPU)
    assert torch.equal(first.fused, again.fused)
    assert not torch.equal(first.fused, other.fused)
    assert torch.equal(first.norm, torch.ones(4))
    wide = torch.empty(512, 256)
    fill_random({"model.layers.0.mlp.up_proj.weight": wide}, 0, CPU)
    assert wide.std().item() == pytest.approx(1 / 16, rel=0.02)
