"""What outputs are compared with: Hugging Face's forward pass in float32, eager attention, no cache, one sequence.

Greedy ids are checked by one pass over prompt and output: by induction an output is Hugging Face's own greedy output
exactly if each of its ids is the most likely one (the lowest id on ties) after those before it. The same pass shows how
far the runner-up was, which screens out prompts whose text rounding could change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsespec import LLM, SamplingParams
from sparsespec.loader import default_model_path
from sparsespec.testing import tiny_model

MIN_GAP = 1e-3  # between the best and the second logit, at every step of a screened prompt

PROMPTS = [
    "The three states of water are", "A short letter to a neighbour about a borrowed ladder:\n\nDear",
    "def is_prime(n):\n", "List five animals that live in the sea.\n1.", "The train left the station at noon and",
    "Question: What is 12 times 11?\nAnswer:",
    "Once upon a time a fox found a lamp in the snow.", "To make bread you need flour, water, salt and",
    "In mathematics, a prime number is", "The capital cities of France, Spain and Italy are", "SELECT name FROM users WHERE",
    "My favourite season is autumn, because", "The difference between a virus and a bacterium is that",
    "class Stack:\n    def __init__(self):\n", "Roses are red, violets are blue,", "How do plants turn sunlight into food? They",
    "Dear customer, thank you for", "The old lighthouse keeper looked at the sea and said:", "1, 1, 2, 3, 5, 8, 13,",
    "A haiku about rain:\n", "The company reported that its sales had", "import numpy as np\n\nx = np.arange(10)\nprint(",
    "Gravity is the force that", "When the teacher entered the room, the children", "Health experts say that sleeping enough",
    "The recipe begins with two onions and", "Yesterday I walked to the market to buy",
    "An electric car differs from a petrol car in",
    "The moon moves around the earth in", "If it rains tomorrow, we will",
]


def tiny_path(kind: str, **settings: Any) -> Path:
    """The tiny model of a model_type that the tests share."""
    return tiny_model(kind, 0, **settings)


def tiny_prompts(count: int, vocab_size: int = 256, seed: int = 0) -> list[list[int]]:
    """Random prompts of 20 to 90 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(20, 91)).tolist() for _ in range(count)]


@dataclass
class Reference:
    """A Hugging Face model. `checked` counts the tokens that were compared with it."""

    model: Any
    checked: int = 0

    @staticmethod
    @cache
    def directory(path: Path) -> Reference:
        """Of a Hugging Face directory."""
        return Reference(_load(path))

    @staticmethod
    @cache
    def smollm2() -> Reference:
        """Of the embedded default model."""
        path = default_model_path()
        return Reference(_load(path.parent, gguf_file=path.name))

    @torch.inference_mode()
    def logits(self, ids: list[int], count: int) -> Tensor:
        """Logits [count, V] that choose the last `count` tokens of `ids`."""
        out = self.model(torch.tensor([ids[:-1]]), use_cache=False, logits_to_keep=count).logits[0]
        return out.float()  # type: ignore[no-any-return]

    def check(self, prompt: list[int], output: list[int]) -> float:
        """The smallest gap between the two best logits while `output` was chosen greedily.

        Asserts that it is Hugging Face's greedy output up to the first step whose gap is below MIN_GAP.
        """
        logits = self.logits(prompt + output, len(output))
        best = logits.topk(2).values
        gaps = best[:, 0] - best[:, 1]
        close = (gaps < MIN_GAP).nonzero()
        steps = int(close[0]) if len(close) else len(output)
        expected = _lowest_argmax(logits)
        assert output[:steps] == expected[:steps]
        self.checked += steps
        return float(gaps.min())

    def screen(self, llm: LLM, prompts: list[Any], max_tokens: int, wanted: int) -> list[tuple[list[int], list[int]]]:
        """The first `wanted` prompts whose gaps are wide enough, with Hugging Face's greedy ids, EOS ignored.

        `llm` proposes the ids, which are then checked one by one; most prompts have to pass.
        """
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        kept: list[tuple[list[int], list[int]]] = []
        for out in llm.generate(prompts, params, use_tqdm=False):
            ids = out.outputs[0].token_ids
            if len(kept) < wanted and self.check(out.prompt_token_ids, ids) >= MIN_GAP:
                assert len(ids) == max_tokens
                kept.append((out.prompt_token_ids, ids))
        assert len(kept) == wanted
        return kept


def _lowest_argmax(logits: Tensor) -> list[int]:
    return (logits == logits.amax(-1, keepdim=True)).int().argmax(-1).tolist()  # argmax takes the first of equals


def _load(path: Path, **kwargs: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, attn_implementation="eager", **kwargs).eval()
