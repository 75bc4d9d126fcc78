"""Quest against a policy of one's own, which sees every n-th token and the latest ones. python examples/quest.py"""

from typing import Any

import torch

from sparsespec import LLM, SamplingParams
from sparsespec.spec.base import DraftPolicy, Selection, Verified
from sparsespec.spec.registry import POLICIES, register


class Strided(DraftPolicy):
    """Half of the budget spread over the context, half at its end; what came since the verification is seen anyway."""

    name = "strided"
    selects = True

    def select(self, verified: Verified) -> Selection:
        tail, half = verified.tail, min(self.budget(verified.length), verified.tail) // 2
        chosen = torch.cat((torch.linspace(0, max(tail - half - 1, 0), half).long(), torch.arange(tail - half, tail)))
        return Selection(chosen.expand(self.model.num_layers, self.model.num_kv_heads, -1))


def main(model: Any = None, max_tokens: int = 48) -> list[list[int]]:
    """Complete a list with each policy; gives the token ids, which are all the same."""
    if "strided" not in POLICIES:
        register("strided", Strided)
    prompt, ids = "".join(f"Item {i} costs {7 * i} coins.\n" for i in range(1, 40)), []
    for method in ("none", "quest", "strided", "window"):
        llm = LLM(model, kv_cache_tokens=1024, speculative_config={"method": method, "min_budget": 48, "adaptive": False})
        model = llm.loaded  # load the weights once
        out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)[0]
        print(f"{method:8} {out.metrics.num_accepted_tokens} of {out.metrics.num_draft_tokens} drafts accepted")
        ids.append(out.outputs[0].token_ids)
    return ids


if __name__ == "__main__":
    main()
