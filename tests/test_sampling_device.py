"""The same tokens and random bits on CUDA as on the CPU; runs where there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsespec.core.sampling_params import SamplingParams
from sparsespec.sampling import rng
from sparsespec.sampling.logprobs import gather_logprobs, processed_logprobs
from sparsespec.sampling.sampler import Rows, Sampler
from sparsespec.sampling.table import SamplingTable
from sparsespec.verify.greedy import match
from sparsespec.verify.rejection import rejection

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
V = 5000
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0.7}, {"temperature": 1.0, "coupled": True}, {"top_k": 20, "top_p": 0.9},
    {"top_p": 0.99, "min_p": 0.001, "coupled": True}, {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"logit_bias": {5: 4.0}, "allowed_token_ids": list(range(0, V, 3)), "min_tokens": 30, "max_tokens": None},
]


def _run(device: str) -> list[torch.Tensor]:
    table = SamplingTable(len(PARAMS), V, device)
    for slot, kw in enumerate(PARAMS):
        kw = dict(kw)
        coupled = kw.pop("coupled", False)
        table.set(slot, SamplingParams(**kw), prompt_len=3, seed=slot - 2**62, coupled=coupled, eos_token_ids=(3, 9),
                  bad_word_ids=[[7], [1, 6]])
    g = torch.Generator().manual_seed(0)
    n = 30 * len(PARAMS)
    logits = (torch.randn(n, V, generator=g) * 3).to(device)
    logits[11, 4] = float("nan")
    tokens = torch.randint(0, V, (len(PARAMS), 64), generator=g).to(device)
    rows = Rows((torch.arange(n) % len(PARAMS)).to(device), torch.randint(3, 64, (n,), generator=g).to(device))
    s = Sampler(table)
    dist = s.distribution(logits, rows, tokens)
    drafts = s.sample_draft(dist, rows, rows.positions)
    target = s.sample_target_tokens(dist, rows)
    top = gather_logprobs(processed_logprobs(logits, rows, s, tokens), target, 5)
    assert dist.probs is not None
    probs = dist.probs[:40].view(10, 4, V)
    u = rng.uniform(torch.arange(30, device=device), torch.arange(30, device=device), 5, rng.ACCEPT).view(10, 3)
    count = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0, 3, 3], device=device)
    own = rng.inverse_cdf(probs[:, 1:].reshape(30, V), u.flatten()).view(10, 3)
    rejected = rejection(own, count, probs, probs[:, 1:], u, u, u[:, 0])
    matched = match(drafts[:30].view(10, 3), count, target[:40].view(10, 4))
    return [drafts, target, dist.argmax, dist.bad, dist.index, top[1], top[2], u, rejected.tokens, rejected.num_accepted,
            matched.tokens, matched.num_emitted]


def test_cuda_equals_cpu() -> None:
    for cpu, cuda in zip(_run("cpu"), _run("cuda"), strict=True):
        assert torch.equal(cpu, cuda.cpu())


def test_random_bits_are_identical() -> None:
    keys = torch.arange(-500, 500) * 2**50
    for stream in (rng.TARGET, rng.COUPLED):
        assert torch.equal(rng.uniform(keys, keys, keys, stream), rng.uniform(*[keys.cuda()] * 3, stream).cpu())
    e = rng.exponential(keys, keys, 300, rng.COUPLED)
    torch.testing.assert_close(rng.exponential(keys.cuda(), keys.cuda(), 300, rng.COUPLED).cpu(), e, rtol=1e-6, atol=0)
