"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsespec.core.outputs import Logprob, LogprobDict
from sparsespec.server.token_text import TokenText


class LogprobWriter:
    """Writes tokens with their log probabilities. as_ids: tokens are written as `token_id:N`."""

    def __init__(self, tokens: TokenText, num_top: int, as_ids: bool) -> None:
        self.tokens, self.num_top, self.as_ids = tokens, num_top, as_ids

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[LogprobDict]) -> dict[str, Any]:
        """`logprobs` of a chat choice: content, one entry a token with its num_top best tokens, best first."""
        return {"content": [self._entry(i, row[i]) | {"top_logprobs": [self._entry(t, lp) for t, lp in self._top(row)]}
                            for i, row in zip(token_ids, logprobs, strict=True)], "refusal": None}

    def text(self, token_ids: Sequence[int], logprobs: Sequence[LogprobDict | None], offset: int) -> tuple[dict[str, Any], int]:
        """(`logprobs` of a text completion, the offset after them). A None row, the prompt's first token, has no probability."""
        out: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": [] if self.num_top else None}
        for token_id, row in zip(token_ids, logprobs, strict=True):
            name = self._name(token_id)
            out["text_offset"].append(offset)
            out["tokens"].append(name)
            out["token_logprobs"].append(row[token_id].logprob if row is not None else None)
            if self.num_top:
                out["top_logprobs"].append(self._by_name(token_id, row) if row is not None else None)
            offset += len(self.tokens.of(token_id)[0])
        return out, offset

    def _by_name(self, token_id: int, row: LogprobDict) -> dict[str, float]:
        """Best first; of tokens that read alike the more likely one counts. The sampled token is always in."""
        out: dict[str, float] = {}
        for i, lp in [*self._top(row), (token_id, row[token_id])]:
            out.setdefault(self._name(i), lp.logprob)
        return out

    def _top(self, row: LogprobDict) -> list[tuple[int, Logprob]]:
        """The num_top best: the row holds these, and the sampled token, which comes first and may not be one of them."""
        return sorted(row.items(), key=lambda item: (-item[1].logprob, item[0]))[:self.num_top]

    def _entry(self, token_id: int, lp: Logprob) -> dict[str, Any]:
        return {"token": self._name(token_id), "logprob": lp.logprob, "bytes": self.tokens.of(token_id)[1]}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self.tokens.of(token_id)[0]


def prompt_logprobs(rows: Sequence[LogprobDict | None] | None, tokens: TokenText) -> list[dict[str, Any] | None] | None:
    """The prompt's log probabilities as vLLM writes them: token id → logprob, rank, decoded_token."""
    if rows is None:
        return None
    return [None if row is None else {str(i): {"logprob": lp.logprob, "rank": lp.rank, "decoded_token": tokens.of(i)[0]}
                                      for i, lp in row.items()} for row in rows]
