"""The Triton backend within the engine, under the interpreter: the same ids as PyTorch's, and the existing views' tests."""

from __future__ import annotations

import kernel_env  # noqa: F401 (before the kernels)
import pytest
import torch

from driving import speculate, token_ids
from reference import tiny_prompts
from sparsespec import LLM, SamplingParams
from sparsespec.attention.registry import backend_class, make_backend
from sparsespec.attention.triton import TritonBackend
from sparsespec.config.model import ModelConfig
from sparsespec.core.errors import InvalidValueError, UnsupportedError
from sparsespec.kv.pool import KVPool
from sparsespec.loader.loaded import LoadedModel

pytestmark = pytest.mark.usefixtures("one_thread")


def generate(loaded: LoadedModel, backend: str, **spec: object) -> tuple[list[list[int]], dict[str, object]]:
    """Greedy ids of three prompts, and the engine's counters."""
    llm = LLM(loaded, speculative_config=spec, kv_cache_tokens=512, max_model_len=128, max_num_seqs=3,
              attention_backend=backend, page_size=4)
    ids = token_ids(llm.generate([{"prompt_token_ids": p[:24]} for p in tiny_prompts(3)],
                                 SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), use_tqdm=False))
    return ids, llm.stats()


@pytest.mark.parametrize("spec", [
    {"method": "none"}, speculate(3, 0.2), speculate(3, 0.2, score_rows="accepted"), speculate(2, method="quest"),
    speculate(3, method="triforce")], ids=["none", "pillar", "pillar accepted", "quest", "triforce"])
def test_the_same_ids_as_torch(spec: dict[str, object], tiny_models: dict[str, LoadedModel]) -> None:
    """Plain, with scores kept by the backend, with a sink, views that depend on queries, proposals under the sparse pass."""
    wanted, _ = generate(tiny_models["qwen3"], "torch", **spec)
    found, stats = generate(tiny_models["qwen3"], "triton", **spec)
    assert found == wanted
    if spec["method" if "method" in spec else "num_speculative_tokens"] != "none":
        assert stats["num_drafts"]


def test_a_backend_that_cannot_run_here_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA and without the interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET")
    config = ModelConfig("llama", 64, 32, 32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16)
    pool = KVPool(config, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="CUDA"):
        make_backend("triton", False, config, pool)
    with pytest.raises(InvalidValueError, match="auto, torch"):
        make_backend("tritn", False, config, pool)
    assert backend_class("triton") is TritonBackend
