"""The closed-form planner: what a round of k drafts gains over plain decoding (SparseSpec's speed-up model).

B requests with M tokens of KV in all. Plain decoding gives a token in T_gemm(B) + T_attn(M). With k drafts over a share
s of the KV and phases mixed evenly, an iteration carries (2k+1)/(k+1)·B rows and (ks+1)/(k+1)·M of KV, and k+1 of them give
kα + 1 tokens, where α is the share of drafts that is accepted, the bonus token not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsespec.plan.costs import CostModel
from sparsespec.spec.cost import expected_tokens


@dataclass(frozen=True)
class Gain:
    """k = 0 is plain decoding. Times in ms; tokens a round with its bonus token; gain: of throughput over plain decoding.

    attention_gain: the gain if KV were all that costs, (kα + 1) / (ks + 1). formula: by products and KV alone, as the paper
    has it. gain adds the step's overhead, the selection's scoring and the lower bandwidth on gathered entries.
    """

    k: int
    tokens: float
    rows: float
    iteration_ms: float
    token_ms: float
    attention_gain: float
    formula: float
    gain: float


def attention_gain(k: int, alpha: float, s: float) -> float:
    """Gain of a decode that reads KV and does nothing else."""
    return (k * alpha + 1) / (k * s + 1)


def gains(costs: CostModel, batch: int, context: float, s: float, acceptance: Sequence[float], alpha: float | None,
          min_budget: int = 0) -> list[Gain]:
    """Plain decoding and every k up to len(acceptance); alpha overrides the acceptance by position."""
    kv = batch * context
    plain_formula = costs.gemm(batch) + costs.attention(kv)
    plain = plain_formula + costs.overhead()
    found = [Gain(0, 1.0, batch, plain, plain, 1.0, 1.0, 1.0)]
    for k in range(1, len(acceptance) + 1):
        tokens = expected_tokens(acceptance, k) if alpha is None else k * alpha + 1
        rows = (2 * k + 1) / (k + 1) * batch
        formula_ms = costs.gemm(rows) + costs.attention((k * s + 1) / (k + 1) * kv)
        view = min(context, max(s * context, min_budget) + (k + 1) / 2)
        ms = costs.gemm(rows) + costs.overhead() + costs.attention(kv / (k + 1), batch * view * k / (k + 1), scored=True)
        rounds = (k + 1) / tokens
        found.append(Gain(k, tokens, rows, ms, ms * rounds, attention_gain(k, (tokens - 1) / k, s),
                          plain_formula / (rounds * formula_ms), plain / (rounds * ms)))
    return found


def best(found: Sequence[Gain]) -> Gain:
    """The k, or 0, with the greatest gain."""
    return max(found, key=lambda g: g.gain)
