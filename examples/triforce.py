"""TriForce: an n-gram proposes, a sliding window checks and extends, full attention verifies what was buffered.

    python examples/triforce.py

Every way of drafting writes the same text; what differs is how many passes over the weights it takes, and how many of
them read the whole KV cache.
"""

from __future__ import annotations

from typing import Any

from sparsespec import LLM, SamplingParams

PROMPT = "Count in words, one number a line.\n" + "".join(f"Line {i}: the number is {i}.\n" for i in range(1, 31))
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "none"}, {"method": "ngram"}, {"method": "window"}, {"method": "triforce"},
    {"method": "hierarchy", "num_proposed_tokens": 4})  # the same with PillarAttn in the middle


def main(model: Any = None, max_tokens: int = 64) -> list[list[int]]:
    """Complete the prompt with each method; gives the token ids, which are all the same."""
    ids = []
    for config in METHODS:
        llm = LLM(model, kv_cache_tokens=1024, speculative_config={**config, "min_budget": 64, "adaptive": False})
        model = llm.loaded  # load the weights once
        out = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)[0]
        tokens, stats = out.outputs[0].token_ids, llm.stats()
        full = len(tokens) - stats["num_accepted_tokens"]
        print(f"{config['method']:10} {len(tokens)} tokens in {stats['iterations']:3} passes, {full:3} of them with full attention")
        ids.append(tokens)
    return ids


if __name__ == "__main__":
    main()
