"""N-gram drafts (prompt lookup): what followed the latest tokens when they last stood in the text.

A suffix automaton of the request's own text finds the longest suffix that occurred before in time that does not grow with
the text. Proposals are certain (one-hot): a sampled request accepts one with the target's own probability of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsespec.spec.base import DraftPolicy, ProposeContext


class SuffixAutomaton:
    """All substrings of a growing sequence (Blumer et al. 1985), each state with an end position where it occurs.

    Amortised constant time and memory a token.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [-1]
        self._last = self._asked = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        if tokens and self._asked:
            self._end[self._asked] = len(self.text) - 1  # its latest place, for the next time: recent text repeats more often
            self._asked = 0
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        state = self._state(self._length[self._last] + 1, {}, 0, len(self.text))
        self.text.append(token)
        at, self._last = self._last, state
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = state
            at = self._link[at]
        if at < 0:
            return
        found = self._next[at][token]
        if self._length[found] == self._length[at] + 1:
            self._link[state] = found
            return
        clone = self._state(self._length[at] + 1, dict(self._next[found]), self._link[found], self._end[found])
        while at >= 0 and self._next[at].get(token) == found:
            self._next[at][token] = clone
            at = self._link[at]
        self._link[found] = self._link[state] = clone

    def _state(self, length: int, following: dict[int, int], link: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

    def follow(self, after: Sequence[int], shortest: int, longest: int, count: int) -> list[int]:
        """Up to `count` tokens that followed an earlier place of the longest suffix of text + `after`, [] if it is too short.

        Only suffixes of `shortest` to `longest` tokens count; of a state's places the first is taken, or the latest that was
        asked for.
        """
        state, length = self._link[self._last], 0
        length = self._length[state] if state > 0 else 0
        for token in after:
            while state > 0 and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            state = self._next[max(state, 0)].get(token, 0)
            length = length + 1 if state else 0
        if state <= 0 or min(length, longest) < shortest:
            return []
        start = self._end[state] + 1
        if not after:
            self._asked = state
        return self.text[start:start + count]


class NGram(DraftPolicy):
    """`num_speculative_tokens` at most; suffixes of prompt_lookup_min to prompt_lookup_max tokens (longer ones match as well)."""

    name = "ngram"
    proposes = True

    def propose(self, context: ProposeContext) -> list[list[int]]:
        found = []
        for i, request in enumerate(context.requests):
            slot = int(context.slots[i])
            automaton = self.state.setdefault(slot, SuffixAutomaton())
            known, prompt = len(automaton.text), request.prompt_token_ids
            automaton.extend(prompt[known:])
            automaton.extend(request.output_token_ids[max(known - len(prompt), 0):])
            found.append(automaton.follow(context.buffered(i), self.config.prompt_lookup_min, self.config.prompt_lookup_max,
                                          int(context.most[i])))
        return found
