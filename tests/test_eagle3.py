"""EAGLE-3: what the head proposes equals a plain computation from the checkpoint, and checkpoints that do not fit are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from driving import assert_idle, token_ids
from reference import Reference
from sparsespec import LLM, SamplingParams
from sparsespec.config.engine import LoadConfig
from sparsespec.core.errors import InvalidValueError, ModelLoadError
from sparsespec.loader import load_model
from sparsespec.loader.eagle3 import feature_layers, load_eagle3
from sparsespec.loader.loaded import LoadedModel
from sparsespec.spec.base import Features, ProposeContext
from sparsespec.spec.eagle3 import Eagle3
from sparsespec.testing import force_preemption, running_requests, tiny_eagle3, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
TARGET = tiny_llama(3, num_layers=8)
LAYERS = (2, 4, 5)  # of 8: what EAGLE's own code reads


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model(LoadConfig(model=str(TARGET), skip_tokenizer_init=True, device="cpu"))


class PlainHead:
    """The head as the paper describes it: no cache, one sequence, everything computed anew for each token."""

    def __init__(self, path: Path) -> None:
        self.w: dict[str, Tensor] = load_file(path / "model.safetensors")
        self.c: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.hf = Reference.directory(TARGET).model
        self.embedding = self.w.get("embed_tokens.weight", self.hf.model.embed_tokens.weight)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.c["rms_norm_eps"])

    def layer(self, hidden: Tensor, tokens: Tensor, first: int) -> Tensor:
        w, n, dim = self.w, len(tokens), self.c["head_dim"]
        normed = self.norm(hidden, "midlayer.hidden_norm")
        x = torch.cat((self.norm(self.embedding[tokens], "midlayer.input_layernorm"), normed), -1)
        q, k, v = ((x @ w[f"midlayer.self_attn.{p}_proj.weight"].T).view(n, -1, dim).transpose(0, 1) for p in "qkv")
        angles = torch.outer(torch.arange(first, first + n).float(), 10000.0 ** -(torch.arange(0, dim, 2) / dim)).repeat(1, 2)

        def rotate(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return t * angles.cos() + torch.cat((-b, a), -1) * angles.sin()

        group = len(q) // len(k)
        k, v = rotate(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        logits = rotate(q) @ k.transpose(1, 2) / dim**0.5 + torch.full((n, n), -torch.inf).triu(1)
        seen = (logits.softmax(-1) @ v).transpose(0, 1).flatten(1)
        h = (normed if self.c.get("norm_before_residual") else hidden) + seen @ w["midlayer.self_attn.o_proj.weight"].T
        y = self.norm(h, "midlayer.post_attention_layernorm")
        gate, up = (y @ w[f"midlayer.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        return h + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T

    @torch.inference_mode()
    def chain(self, ids: list[int], buffered: list[int], count: int, first: int = 0) -> tuple[list[int], float]:
        """Greedy proposals after ids + buffered, and the smallest gap between the two best logits. first: position that it knows
        features from."""
        states = self.hf(torch.tensor([ids[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
        hidden = torch.cat([states[i][0, first:] for i in LAYERS], -1) @ self.w["fc.weight"].T
        tokens, found, gap = ids[first + 1:], list[int](), 1e9
        for step in range(len(buffered) + count):
            out = self.layer(hidden, torch.tensor(tokens), first)
            if step >= len(buffered):
                logits = self.norm(out[-1], "norm") @ self.w["lm_head.weight"].T
                best = logits.topk(2)
                gap = min(gap, float(best.values[0] - best.values[1]))
                index = int(best.indices[0])
                found.append(index + int(self.w["d2t"][index]))
            hidden, tokens = torch.cat((hidden, out[-1:])), [*tokens, (buffered + found)[step]]
        return found, gap


def watch(policy: Any, head: PlainHead, first: Callable[[str], int] = lambda name: 0) -> list[int]:
    """Compare whatever the policy proposes from now on; gives a list that grows with the number of tokens compared."""
    compared: list[int] = []
    propose = policy.propose

    def checked(context: ProposeContext) -> np.ndarray:
        counts = propose(context)
        for i, request in enumerate(context.requests):
            ids, buffered = request.prompt_token_ids + request.output_token_ids, context.buffered(i)
            start = len(ids) + len(buffered)
            drafts = context.tokens[int(context.slots[i]), start:start + int(counts[i])].tolist()
            expected, gap = head.chain(ids, buffered, len(drafts), first(request.request_id))
            assert drafts == expected or gap < 1e-3
            compared.append(len(drafts))
        return counts

    policy.propose = checked
    return compared


def run(llm: LLM, prompts: list[list[int]], tokens: int, between: Callable[[], None] = lambda: None) -> None:
    """Greedy completions, checked against Hugging Face; `between` is called between two steps."""
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=tokens))
    done = {}
    while llm.engine.has_work():
        done.update((o.request_id, o) for o in llm.engine.step())
        between()
    for prompt, ids in zip(prompts, token_ids([done[str(i)] for i in range(len(prompts))]), strict=True):
        assert len(ids) == tokens
        Reference.directory(TARGET).check(prompt, ids)
    assert_idle(llm)


def engine(target: LoadedModel, head: Path, method: str = "eagle3", **settings: Any) -> LLM:
    spec = {"method": method, "model": str(head), "adaptive": False, "num_speculative_tokens": 4, "min_budget": 8,
            **({"proposer": "eagle3", "num_proposed_tokens": 2} if method == "hierarchy" else {})}
    return LLM(target, kv_cache_tokens=2048, max_model_len=256, max_num_batched_tokens=48, speculative_config=spec, **settings)


PROMPTS = [np.random.default_rng(i).integers(0, 256, n).tolist() for i, n in enumerate((3, 90, 25, 41))]


@pytest.mark.parametrize("settings", [{}, {"own_embedding": True, "draft_vocab_size": 256}, {"norm_before_residual": True}],
                         ids=str)
def test_proposals_equal_a_plain_computation(target: LoadedModel, settings: dict[str, Any]) -> None:
    """Prompts in chunks and batches of several lengths; greedy, so that every draft is known."""
    path = tiny_eagle3(TARGET, 1, **settings)
    llm = engine(target, path)
    compared = watch(llm.engine.policies[0], PlainHead(path))
    run(llm, PROMPTS, 10)
    assert sum(compared) > 80


def test_under_a_sparse_pass(target: LoadedModel) -> None:
    """A hierarchy buffers drafts that the head did not propose; it runs through them once, and goes on from there."""
    path = tiny_eagle3(TARGET, 1)
    llm = engine(target, path, "hierarchy")
    compared = watch(llm.engine.policies[0].proposer, PlainHead(path))  # type: ignore[attr-defined]
    run(llm, PROMPTS[1:3], 16)
    assert sum(compared) > 60


def test_preemption_and_moves(target: LoadedModel) -> None:
    """Requests are preempted, or all their states are taken away, overwritten and given back to slots in another order."""
    path = tiny_eagle3(TARGET, 1)
    llm = engine(target, path)
    policy = llm.engine.policies[0]
    assert isinstance(policy, Eagle3)
    compared = watch(policy, PlainHead(path))
    rng = np.random.default_rng(0)

    @torch.inference_mode()
    def disturb() -> None:
        running = running_requests(llm)
        if running and rng.random() < 0.25 and llm.stats()["num_preemptions"] < 10:
            force_preemption(llm, str(rng.choice(sorted(running))))
        llm.engine.scheduler.vacated, left = [], llm.engine.scheduler.vacated
        for slot in left:
            llm.engine.runner.leave(slot)
        slots = [r.slot for r in running_requests(llm).values()]
        states = {slot: policy.take(slot) for slot in slots}
        for slot in slots:
            policy.leave(slot)
        if policy._cache is not None:
            policy._cache.data.fill_(7.0)
        for slot in reversed(slots):
            policy.give(slot, states[slot])

    run(llm, PROMPTS, 16, disturb)
    assert sum(compared) > 80
    assert llm.stats()["num_preemptions"] >= 3


def test_a_prefix_without_features(target: LoadedModel) -> None:
    """Where the target computed nothing, the head begins later, and drafts from what it saw."""
    path = tiny_eagle3(TARGET, 1)
    llm = engine(target, path)
    policy = llm.engine.policies[0]
    absorb, skipped = policy.absorb, 17

    def late(features: Features, tokens: Tensor) -> None:
        keep = features.positions >= skipped
        if bool(keep.any()):
            absorb(Features(features.hidden[:, keep], features.slots[keep], features.positions[keep]), tokens)

    policy.absorb = late  # type: ignore[method-assign]
    compared = watch(policy, PlainHead(path), lambda name: skipped)
    run(llm, PROMPTS[1:], 8)
    assert sum(compared) > 40


def test_a_request_may_choose_among_an_engine_with_a_head(target: LoadedModel) -> None:
    """Other k, other methods, or the head under a sparse pass: all share the head and keep their own state."""
    path = tiny_eagle3(TARGET, 1)
    llm = engine(target, path, "hierarchy")
    asked: list[dict[str, Any] | None] = [None, {"method": "eagle3"}, {"method": "eagle3", "num_speculative_tokens": 2},
                                          {"method": "pillar"}, {"num_proposed_tokens": 1}, {"method": "none"}]
    params = [SamplingParams(temperature=0, max_tokens=12, speculative_config=a) for a in asked]
    outputs = llm.generate([PROMPTS[2]] * len(params), params, use_tqdm=False)
    for ids in token_ids(outputs):
        Reference.directory(TARGET).check(PROMPTS[2], ids)
    policies = [p for p in llm.engine.policies.policies if p.needs_head]
    assert len(policies) == 4


def test_tokens_outside_the_draft_vocabulary_are_never_proposed(target: LoadedModel) -> None:
    path = tiny_eagle3(TARGET, 1, draft_vocab_size=20)
    head = load_eagle3(str(path), target)
    logits = head.logits(torch.randn(5, 64))
    known = load_file(path / "model.safetensors")["t2d"]
    assert int(known.sum()) == 20
    assert torch.equal(logits.isfinite(), known.expand(5, -1))


def test_feature_layers() -> None:
    assert feature_layers({}, 36, "") == (2, 18, 33)
    assert feature_layers({}, 2, "") == (1, 1, 0)
    assert feature_layers({}, 1, "") == (0, 0, 0)
    assert feature_layers({"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}, 12, "") == (1, 5, 9)
    assert feature_layers({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}}, 12, "") == (2, 6, 10)
    with pytest.raises(ModelLoadError):
        feature_layers({"eagle_aux_hidden_state_layer_ids": [1, 5, 12]}, 12, "")


# -- checkpoints that do not fit ---------------------------------------------------------------------------------------

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def shift(t: dict[str, Tensor], c: dict[str, Any]) -> None:
    t["d2t"][-1] += 1000


def same_twice(t: dict[str, Tensor], c: dict[str, Any]) -> None:
    t["d2t"][1] = t["d2t"][0] - 1


def swap(t: dict[str, Tensor], c: dict[str, Any]) -> None:
    t["t2d"] = ~t["t2d"]


BROKEN: dict[str, tuple[Change, str]] = {
    "missing": (lambda t, c: t.pop("midlayer.mlp.up_proj.weight"), "midlayer.mlp.up_proj.weight"),  # type: ignore[dict-item]
    "unused": (lambda t, c: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}), "q_norm"),
    "shape": (lambda t, c: t.update({"fc.weight": torch.ones(64, 128)}), "fc.weight has shape"),
    "no map": (lambda t, c: t.pop("d2t"), "d2t"),  # type: ignore[dict-item]
    "map's shape": (lambda t, c: t.update({"t2d": torch.ones(7, dtype=torch.bool)}), "t2d has shape"),
    "map's range": (shift, "outside"), "map twice": (same_twice, "two directions"), "maps contradict": (swap, "two directions"),
    "no head": (lambda t, c: t.pop("lm_head.weight"), "no lm_head"),  # type: ignore[dict-item]
    "not a head": (lambda t, c: c.pop("draft_vocab_size"), "draft_vocab_size"),
    "other target": (lambda t, c: c.update(vocab_size=300), "vocab_size is 300"),
    "other width": (lambda t, c: c.update(hidden_size=32), "width"),
    "layers": (lambda t, c: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 30]}), "8 layers"),
}


def altered(folder: Path, change: Change) -> Path:
    source = tiny_eagle3(TARGET, 1)
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_checkpoints_are_refused(kind: str, target: LoadedModel, tmp_path: Path) -> None:
    change, said = BROKEN[kind]
    with pytest.raises(ModelLoadError, match=said) as error:
        load_eagle3(str(altered(tmp_path, change)), target)
    assert error.value.field == "speculative_config.model"
    assert error.value.remedy


def test_weights_in_pytorch_model_bin(target: LoadedModel, tmp_path: Path) -> None:
    path = altered(tmp_path, lambda t, c: None)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    hidden = torch.randn(3, 64)
    same = load_eagle3(str(tiny_eagle3(TARGET, 1)), target)
    assert torch.equal(load_eagle3(str(path), target).logits(hidden), same.logits(hidden))
    (path / "pytorch_model.bin").write_bytes((path / "pytorch_model.bin").read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="not a complete PyTorch file"):
        load_eagle3(str(path), target)
    torch.save({"fc.weight": 1}, path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="something else"):
        load_eagle3(str(path), target)
    shutil.rmtree(path)
    with pytest.raises(ModelLoadError, match="no such file"):
        load_eagle3(str(path), target)


def test_a_head_is_asked_for_and_has_to_be_used(target: LoadedModel) -> None:
    for config in ({"method": "eagle3"}, {"method": "hierarchy", "proposer": "eagle3"}):
        with pytest.raises(InvalidValueError, match="needs a draft head"):
            LLM(target, speculative_config=config)
    with pytest.raises(InvalidValueError, match="uses no draft head"):
        LLM(target, speculative_config={"model": str(tiny_eagle3(TARGET, 1))})
    llm = LLM(target, kv_cache_tokens=256)
    with pytest.raises(InvalidValueError, match="without a draft head"):
        llm.generate([1, 2, 3], SamplingParams(speculative_config={"method": "eagle3"}), use_tqdm=False)
