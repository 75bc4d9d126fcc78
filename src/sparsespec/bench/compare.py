"""Whether two runs gave the same tokens and, where not, whether rounding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsespec.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sparsespec.llm import LLM

# Rounding of a low-precision forward pass moves a log-probability by about this much; a wrong token is further off.
NEAR_TIE = {"torch.bfloat16": 0.25, "torch.float16": 0.05}


@dataclass(frozen=True)
class Difference:
    """prompt: its index. position: first output token that differs. expected, got: ids, None where one output ended.

    gap: how far the two tokens' log-probabilities are apart under plain decoding; None where that can't be said.
    """

    prompt: int
    position: int
    expected: int | None
    got: int | None
    gap: float | None = None


def differences(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> list[Difference]:
    """The first difference of each pair of outputs that are not equal."""
    found = []
    for index, (a, b) in enumerate(zip(expected, got, strict=True)):
        if list(a) != list(b):
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found.append(Difference(index, at, a[at] if at < len(a) else None, b[at] if at < len(b) else None))
    return found


def measure_gaps(llm: LLM, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]],
                 found: Sequence[Difference]) -> list[Difference]:
    """Fill in `gap`: one more plain pass over each prompt and the tokens that both outputs share."""
    measured = []
    for d in found:
        gap = None
        if d.expected is not None and d.got is not None:
            ids = [*prompts[d.prompt], *expected[d.prompt][:d.position]]
            params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, detokenize=False)
            completion = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0]
            top = completion.logprobs[0] if completion.logprobs else {}
            if d.expected in top and d.got in top:
                gap = abs(top[d.expected].logprob - top[d.got].logprob)
        measured.append(Difference(d.prompt, d.position, d.expected, d.got, gap))
    return measured


def explained(found: Sequence[Difference], dtype: str) -> bool:
    """Whether every difference is a near-tie that rounding in this dtype decides. Never so in float32."""
    limit = NEAR_TIE.get(dtype)
    return not found or (limit is not None and all(d.gap is not None and d.gap <= limit for d in found))
