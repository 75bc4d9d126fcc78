"""From committed tokens to RequestOutput: text, stop strings, log probabilities, and the n completions of one prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sparsespec.core.errors import SparseSpecError
from sparsespec.core.outputs import CompletionOutput, LogprobDict, RequestMetrics, RequestOutput
from sparsespec.core.request import Request
from sparsespec.engine.detokenizer import IncrementalDetokenizer
from sparsespec.engine.stop import StopChecker


class Completion:
    """One completion while it grows."""

    def __init__(self, request: Request, index: int, tokenizer: Any | None) -> None:
        p = request.params
        self.request, self.index = request, index
        self.output = CompletionOutput(index, token_ids=request.output_token_ids)
        if p.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._text = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, p.skip_special_tokens,
                                            p.spaces_between_special_tokens) if tokenizer and p.detokenize else None
        self._stop = StopChecker(p.stop_strings, p.include_stop_str_in_output, p.min_tokens)
        self._cut: int | None = None  # characters to keep, where a stop string ended it
        self._given_chars, self._given_tokens, self._given_reason = 0, 0, False

    def add(self, tokens: list[int], logprobs: list[LogprobDict] | None, reason: str | None, stop_token: int | None,
            accepted: int = 0) -> None:
        """Take newly committed tokens, which `request.output_token_ids` already holds. Ends it where a stop string matches.

        accepted: how many of them, from the first on, are accepted drafts.
        """
        out = self.output
        out.from_draft += [True] * accepted + [False] * (len(tokens) - accepted)
        if out.logprobs is not None and logprobs:
            first = len(out.logprobs)
            out.logprobs.extend(logprobs[:len(tokens)])
            self._sum_logprobs(first, out.cumulative_logprob or 0.0)
        if self._text is not None:
            hide_last = stop_token is not None and not self.request.params.include_stop_str_in_output
            new = len(self._text.append(tokens[:-1] if hide_last else tokens))
            if reason is not None:
                new += len(self._text.flush())
            match = self._stop.check(self._text, new)
            if match is not None:
                self._cut = match.cut
                del self.request.output_token_ids[match.num_tokens:], out.from_draft[match.num_tokens:]
                if out.logprobs is not None:
                    del out.logprobs[match.num_tokens:]
                    self._sum_logprobs(0, 0.0)
                reason, out.stop_reason, stop_token = "stop", match.stop, None
        if reason is not None:
            self.finish(reason)
            if stop_token is not None and stop_token not in self.request.eos_ids:
                out.stop_reason = stop_token

    def finish(self, reason: str) -> None:
        """Set the reason; text that was held back comes out."""
        if self._text is not None and self.output.finish_reason is None:
            if reason in ("abort", "error"):
                self._text.flush()
            self.output.text = self._text.text[:self._cut]
        self.output.finish_reason = reason

    def _sum_logprobs(self, first: int, before: float) -> None:
        """Add the log probabilities of the tokens from number `first` on to what those `before` it have."""
        o = self.output
        new = zip((o.logprobs or [])[first:], o.token_ids[first:], strict=True)
        o.cumulative_logprob = sum((d[t].logprob for d, t in new), before)

    def snapshot(self) -> CompletionOutput:
        """The output so far. While it runs, text that may yet turn out to begin a stop string is left out."""
        o = self.output
        return CompletionOutput(o.index, self._settled(0), list(o.token_ids), o.cumulative_logprob,
                                list(o.logprobs) if o.logprobs is not None else None, o.finish_reason, o.stop_reason,
                                list(o.from_draft))

    def delta(self) -> CompletionOutput | None:
        """What came since the last call, None if nothing did. All deltas joined are the snapshot at the end."""
        o, first = self.output, self._given_tokens
        text = self._settled(self._given_chars)
        ended = o.finish_reason is not None and not self._given_reason
        if not ended and not text and len(o.token_ids) <= first:
            return None
        new = CompletionOutput(o.index, text, o.token_ids[first:], o.cumulative_logprob,
                               o.logprobs[first:] if o.logprobs is not None else None, o.finish_reason, o.stop_reason,
                               o.from_draft[first:])
        self._given_chars += len(text)
        self._given_tokens, self._given_reason = len(o.token_ids), o.finish_reason is not None
        return new

    def _settled(self, start: int) -> str:
        """The text from character `start` on, as far as it can no longer change."""
        if self._text is None or self.output.finish_reason is not None:
            return self.output.text[start:]
        return self._text.since(start)[:max(0, self._stop.settled(self._text) - start)]


_COUNTS = tuple(f.name for f in fields(RequestMetrics) if f.name.startswith("num_"))


@dataclass
class Group:
    """The completions of one prompt. stream: every step that adds to it gives an output; deltas: which holds what is new only."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    stream: bool
    lossless: bool
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[LogprobDict | None] | None = None
    error: SparseSpecError | None = None
    deltas: bool = False

    def finished(self) -> bool:
        return all(c.output.finish_reason is not None for c in self.completions)

    def result(self) -> RequestOutput:
        """RequestOutput as of now, or what is new since the last one."""
        metrics = self._metrics()
        if self.deltas:
            outputs = [d for c in self.completions if (d := c.delta()) is not None]
        else:
            outputs = [c.snapshot() for c in self.completions]
        cached = self.completions[0].request.num_cached_tokens
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, self.finished(),
                             self.prompt_logprobs, cached, metrics, self.error, self.lossless)

    def _metrics(self) -> RequestMetrics:
        """Times of the first completion, counts of all of them."""
        each = [c.request.metrics for c in self.completions]
        if self.finished():
            each[0].finished_time = time.monotonic()
        if len(each) == 1:
            return each[0]
        counts = {name: sum(getattr(m, name) for m in each) for name in _COUNTS}
        return replace(each[0], **counts)
