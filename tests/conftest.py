"""Shared fixtures: models that are loaded once a session, and the references that outputs are compared with.

Tests marked slow run with --run-slow; the default run holds a smaller version of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from reference import Reference, tiny_path, tiny_prompts
from sparsespec import LLM
from sparsespec.config.engine import LoadConfig
from sparsespec.loader import load_model
from sparsespec.loader.loaded import LoadedModel


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--run-slow") or "slow" in (config.getoption("-m") or ""):
        return
    skip = pytest.mark.skip(reason="slow: give --run-slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models of a few thousand weights run faster on one thread, and steadily on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smol() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32 on the CPU."""
    return load_model(LoadConfig(dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def smol_reference(smol: LoadedModel) -> Reference:
    """Hugging Face's SmolLM2."""
    return Reference.smollm2()


@pytest.fixture(scope="session")
def tiny_models() -> dict[str, LoadedModel]:
    """Tiny random models by model_type."""
    return {kind: load_model(LoadConfig(model=str(tiny_path(kind)), skip_tokenizer_init=True, device="cpu"))
            for kind in ("llama", "qwen2", "qwen3")}


@pytest.fixture(scope="session")
def tiny_cases(tiny_models: dict[str, LoadedModel]) -> dict[str, list[tuple[list[int], list[int]]]]:
    """By model_type, 8 screened prompts with the 64 greedy tokens that Hugging Face gives."""
    cases = {}
    for kind, loaded in tiny_models.items():
        llm = LLM(loaded, speculative_config={"method": "none"}, kv_cache_tokens=4096, max_model_len=512)
        cases[kind] = Reference.directory(tiny_path(kind)).screen(llm, tiny_prompts(16), 64, 8)
    return cases
