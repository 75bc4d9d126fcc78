"""Changes to the logits before sampling, in vLLM's order: allowed ids, bad words, min_tokens, logit bias, penalties; then
what a grammar or a thinking budget forbids.

All of it is stateless: what was generated is read from the token table, drafts of a row's own history included, so a row
sees the same logits whether its history was drafted or decoded one token at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsespec.sampling.constraint import unpack
from sparsespec.sampling.table import NEG_INF, Feature, SamplingTable


@dataclass(frozen=True)
class Rows:
    """N places where a token is wanted. slots int64 [N]; positions int64 [N]: index in its sequence of the token to choose.

    The history of row i is tokens[slots[i], :positions[i]], drafts included.
    """

    slots: Tensor
    positions: Tensor


_PROCESSED = (Feature.STATIC, Feature.BAD_WORDS, Feature.MIN_TOKENS, Feature.REPETITION, Feature.FREQUENCY,
              Feature.CONSTRAINT)


def process_logits(logits: Tensor, rows: Rows, table: SamplingTable, tokens: Tensor) -> Tensor:
    """Logits float32 [N, V] after all that applies to greedy and sampled requests alike.

    logits [N, V] of any float type is never changed; it is itself the result if it is float32 and no request uses
    any of this. tokens int64 [max_num_seqs, max_len].
    """
    if not any(table.uses(feature) for feature in _PROCESSED):
        return logits.to(torch.float32)
    raw, logits = logits, logits.to(torch.float32, copy=True)
    if table.uses(Feature.STATIC):  # allowed ids and bias are both sums, so they are one
        _add_static(logits, rows, table)
    if table.uses(Feature.BAD_WORDS):
        _ban_words(logits, rows, table, tokens)
    if table.uses(Feature.MIN_TOKENS):
        _suppress_stops(logits, rows, table)
    if table.uses(Feature.REPETITION):
        _penalise_repetition(logits, rows, table, tokens)
    if table.uses(Feature.FREQUENCY):
        _penalise_frequency(logits, rows, table, tokens)
    if table.uses(Feature.CONSTRAINT):
        _constrain(logits, raw, rows, table, tokens)
    return logits


def _add_static(logits: Tensor, rows: Rows, table: SamplingTable) -> None:
    static = table.static_row[rows.slots]
    index = (static >= 0).nonzero().squeeze(1)
    logits[index] += table.static[static[index]]


def _ban_words(logits: Tensor, rows: Rows, table: SamplingTable, tokens: Tensor) -> None:
    """Forbid the last id of a banned sequence where the history, prompt included, ends with the ids before it."""
    slots = rows.slots.tolist()
    for slot in sorted(set(slots) & table.bad_words.keys()):
        words = table.bad_words[slot]
        index = (rows.slots == slot).nonzero().squeeze(1)
        length = words.prefixes.shape[1]
        where = rows.positions[index, None] + torch.arange(-length, 0, device=tokens.device)
        history = torch.where(where >= 0, tokens[slot][where.clamp(min=0)], -2)
        hit = ((history[:, None] == words.prefixes) | (words.prefixes == -1)).all(-1)
        row, word = hit.nonzero(as_tuple=True)
        logits[index[row], words.last[word]] = NEG_INF


def _suppress_stops(logits: Tensor, rows: Rows, table: SamplingTable) -> None:
    early = rows.positions - table.prompt_len[rows.slots] < table.min_tokens[rows.slots]
    row, column = (early[:, None] & (table.stop_ids[rows.slots] >= 0)).nonzero(as_tuple=True)
    logits[row, table.stop_ids[rows.slots[row], column]] = NEG_INF


def _history(index: Tensor, rows: Rows, tokens: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Ids [R, L] in the histories of the rows `index` [R] from position start [R] on, and bool [R, L]: not a repeated filler.

    Every row must have one id or more; short rows repeat their last one, so that all of ids may be written to.
    """
    last = rows.positions[index, None] - 1
    place = start[:, None] + torch.arange(int((last.squeeze(1) - start).max()) + 1, device=tokens.device)
    return tokens[rows.slots[index, None], torch.minimum(place, last)], place <= last


def _penalise_repetition(logits: Tensor, rows: Rows, table: SamplingTable, tokens: Tensor) -> None:
    """Divide positive and multiply negative logits of ids that occur in prompt or output."""
    index = ((table.repetition[rows.slots] != 1) & (rows.positions > 0)).nonzero().squeeze(1)
    if not len(index):
        return
    ids, _ = _history(index, rows, tokens, torch.zeros_like(index))
    chosen, penalty = logits[index[:, None], ids], table.repetition[rows.slots[index], None]
    # An id that occurs twice is written twice, with the same value.
    logits[index[:, None], ids] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)


def _penalise_frequency(logits: Tensor, rows: Rows, table: SamplingTable, tokens: Tensor) -> None:
    """Subtract the frequency penalty once an occurrence in the output, and the presence penalty once."""
    slots, start = rows.slots, table.prompt_len[rows.slots]
    used = (table.frequency[slots] != 0) | (table.presence[slots] != 0)
    index = (used & (rows.positions > start)).nonzero().squeeze(1)
    if not len(index):
        return
    ids, real = _history(index, rows, tokens, start[index])
    counts = torch.zeros(len(index), table.vocab_size, device=logits.device).scatter_add_(1, ids, real.to(torch.float32))
    frequency, presence = table.frequency[slots[index], None], table.presence[slots[index], None]
    logits[index[:, None], ids] = logits[index[:, None], ids] - (frequency * counts.gather(1, ids) + presence)


def _constrain(logits: Tensor, raw: Tensor, rows: Rows, table: SamplingTable, tokens: Tensor) -> None:
    """Forbid what constraints do not allow.

    Where allowed ids, bad words or min_tokens leave none of the tokens that they do allow, those are chosen from by the
    raw logits: a text that breaks its grammar would be of no use.
    """
    found = table.constraints.masks(rows.slots, rows.positions, tokens, table.vocab_size)
    if found is None:
        return
    index, bits = found
    forbidden = ~unpack(bits, table.vocab_size)
    out = logits[index].masked_fill_(forbidden, NEG_INF)
    nothing = out.amax(-1) == NEG_INF
    logits[index] = torch.where(nothing[:, None], raw[index].to(torch.float32).masked_fill(forbidden, NEG_INF), out)
