"""What happens while requests decode, round by round, and the figures that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparsespec.bench.lab.predict import Round

if TYPE_CHECKING:
    from sparsespec.core.request import Request
    from sparsespec.engine.engine import Engine


@dataclass(frozen=True)
class Verification:
    """One full-attention pass of one request: at `context` committed tokens, `drafted` verified, `accepted` of them, `emitted`."""

    context: int
    drafted: int
    accepted: int
    emitted: int


@dataclass
class Tally:
    """passes: forward passes through the weights, rows: of matrix products, kv_bytes: KV read; all summed over requests."""

    verifications: list[Verification] = field(default_factory=list)
    passes: int = 0
    rows: int = 0
    kv_bytes: int = 0

    @property
    def emitted(self) -> int:
        return sum(v.emitted for v in self.verifications)

    def add(self, other: Tally) -> None:
        """Take what other requests did as well."""
        self.verifications += other.verifications
        self.passes, self.rows, self.kv_bytes = self.passes + other.passes, self.rows + other.rows, self.kv_bytes + other.kv_bytes

    def plain_kv_tokens(self) -> int:
        """KV entries that plain decoding reads for the same tokens: each token's whole context."""
        return sum(v.emitted * v.context + v.emitted * (v.emitted - 1) // 2 for v in self.verifications)

    def context(self) -> float:
        """Mean context of an emitted token."""
        return self.plain_kv_tokens() / max(self.emitted, 1)

    def round(self, kv_bytes_per_token: int) -> Round | None:
        """Means for the prediction; None where nothing was decoded."""
        n = len(self.verifications)
        if not n:
            return None
        share = self.kv_bytes / (self.plain_kv_tokens() * kv_bytes_per_token)
        return Round(self.passes / n, self.rows / n, self.emitted / n, share)

    def figures(self, kv_bytes_per_token: int, bucket: int) -> dict[str, Any]:
        """As plain data. Acceptance leaves the bonus token out; by position: of the rounds that drafted there."""
        n, emitted = len(self.verifications), self.emitted
        drafted, accepted = (sum(getattr(v, name) for v in self.verifications) for name in ("drafted", "accepted"))
        depth = max((v.drafted for v in self.verifications), default=0)
        reached = [[v for v in self.verifications if v.drafted > i] for i in range(depth)]
        found = self.round(kv_bytes_per_token)
        return {
            "tokens": emitted, "verifications": n, "mean_context": self.context(),
            "drafted": drafted / n if n else None, "accepted": accepted / n if n else None,
            "accepted_by_position": [sum(v.accepted > i for v in rounds) / len(rounds) for i, rounds in enumerate(reached)],
            "accepted_by_context": self._by_context(bucket),
            "tokens_per_target_pass": emitted / n if n else None,
            "tokens_per_weight_pass": emitted / self.passes if self.passes else None,
            "rows_per_weight_pass": self.rows / self.passes if self.passes else None,
            "kv_bytes_per_token": self.kv_bytes / emitted if emitted else None,
            "kv_share": found.kv_share if found else None,
        }

    def _by_context(self, bucket: int) -> list[dict[str, Any]]:
        groups: dict[int, list[Verification]] = {}
        for v in self.verifications:
            groups.setdefault(v.context // bucket * bucket, []).append(v)
        return [{"from": start, "to": start + bucket, "verifications": len(g), "accepted": sum(v.accepted for v in g) / len(g)}
                for start, g in sorted(groups.items())]


def decode(engine: Engine, requests: Sequence[Request], tokens: int) -> tuple[Tally, list[list[int]]]:
    """Step until each request has `tokens` tokens or has ended by itself; (what happened, the outputs).

    Steps up to the first token of every request are not counted. The requests may want more than `tokens`, so that no
    round before is cut short by their limit; they are aborted when they have enough.
    """
    while any(not r.output_token_ids for r in _live(engine, requests)):
        engine.step()
    _release(engine, requests, tokens)
    live = _live(engine, requests)
    tally, before = Tally(), engine.stats()
    while live:
        had = [(r.num_tokens, r.metrics.num_draft_tokens, r.metrics.num_accepted_tokens) for r in live]
        engine.step()
        tally.passes += len(live)
        for r, (length, drafted, accepted) in zip(live, had, strict=True):
            if r.num_tokens > length:
                m = r.metrics
                tally.verifications.append(Verification(length, m.num_draft_tokens - drafted, m.num_accepted_tokens - accepted,
                                                        r.num_tokens - length))
        _release(engine, live, tokens)
        live = _live(engine, live)
    after = engine.stats()
    tally.rows = after["gemm_rows"] - before["gemm_rows"]
    tally.kv_bytes = after["kv_bytes_read"] - before["kv_bytes_read"]
    return tally, [r.output_token_ids[:tokens] for r in requests]


def _live(engine: Engine, requests: Sequence[Request]) -> list[Request]:
    return [r for r in requests if r.request_id in engine.groups]


def _release(engine: Engine, requests: Sequence[Request], tokens: int) -> None:
    for r in _live(engine, requests):
        if len(r.output_token_ids) >= tokens:
            engine.abort(r.request_id)
