"""EAGLE-3: a trained draft head reads the target's hidden states, alone or under the sparse pass.

    python examples/eagle3.py                                                # tiny random model and head
    python examples/eagle3.py Qwen/Qwen3-8B AngelSlim/Qwen3-8B_eagle3        # any pair in the public formats

Drafts are drawn as the request samples, and verified against their own probabilities: the head's quality changes how
much is accepted, never what is written.
"""

from __future__ import annotations

import sys
from typing import Any

from sparsespec import LLM, SamplingParams
from sparsespec.testing import tiny_eagle3, tiny_qwen3


def main(model: Any = None, head: str | None = None, max_tokens: int = 64) -> list[list[int]]:
    """Greedy text with and without the head; gives the token ids, which are all the same."""
    if model is None:
        path = tiny_qwen3(6, vocab_size=16, num_layers=6)
        model, head = str(path), str(tiny_eagle3(path, draft_vocab_size=8))
    ids = []
    for config in ({"method": "none"}, {"method": "eagle3", "model": head},
                   {"method": "hierarchy", "proposer": "eagle3", "model": head, "num_proposed_tokens": 2, "min_budget": 16}):
        llm = LLM(model, skip_tokenizer_init=True, kv_cache_tokens=1024, speculative_config={"adaptive": False, **config})
        model = llm.loaded
        out = llm.generate(list(range(1, 16)), SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)[0]
        m = out.metrics
        print(f"{config['method']:10} {m.num_accepted_tokens} of {m.num_draft_tokens} drafts accepted")
        ids.append(out.outputs[0].token_ids)
    return ids


if __name__ == "__main__":
    main(*sys.argv[1:3])
