"""The step plan: one shape for prefill chunks, sparse drafts, verification and plain decode.

An item is a run of query rows of one request with a view of its KV: all of it, or the selected entries and the tail.
Nothing outside the scheduler asks which phase a request is in: a verification is an item whose last rows want logits
and whose view is full; plain decode is one without drafts; a prefill chunk is one whose rows want none yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from sparsespec.core.outputs import LogprobDict

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass
class StepPlan:
    """Arrays over items; sparse items come first.

    slots: the request's row in every table. starts: position of the first query row. rows: query rows. drafted: how
    many of the rows are drafts to verify (in a sparse item: drafts buffered before it). sparse: the KV view; such an item
    has one row, and one more for each token that a cheap proposer put after it, to be checked. emit: the rows from
    rows - drafted - 1 on want logits and yield tokens. collect: let the policy select from this pass. assumed: the start
    holds if the request's last verification, whose result was not known, accepted all drafts; the runner moves it back by
    the number of tokens that were rejected.
    """

    slots: Ints
    starts: Ints
    rows: Ints
    drafted: Ints
    sparse: Bools
    emit: Bools
    collect: Bools
    assumed: Bools

    def take(self, kept: Bools) -> StepPlan:
        """The plan of some of its items, kept [items]."""
        return StepPlan(*(getattr(self, f.name)[kept] for f in fields(self)))

    @property
    def num_items(self) -> int:
        return len(self.slots)

    @property
    def num_sparse(self) -> int:
        return int(self.sparse.sum())

    @property
    def num_sparse_rows(self) -> int:
        """Rows of the sparse items, which come first."""
        return int(self.rows[self.sparse].sum())

    @property
    def partial(self) -> npt.NDArray[np.int64]:
        """The prefill chunks that are not their prompts' last."""
        return np.flatnonzero(self.sparse == self.emit)

    @property
    def num_rows(self) -> int:
        """Rows of the step's matrix products."""
        return int(self.rows.sum())


@dataclass
class StepResult:
    """What the device found, for each emitting item in plan order.

    items: index into the plan. tokens [n, k+1]: accepted drafts, then the target's own token. num_tokens: how many of
    them count. bad: the logits after these tokens held NaN or infinity. logprobs: item → one dict a token, for requests
    that want them. draft_counts [sparse items]: tokens that each buffered (None: one each). confidence [sparse items]: the
    draft's own probability of the last of them, where the controller asks for it.
    """

    items: Ints
    tokens: npt.NDArray[np.int64]
    num_tokens: Ints
    bad: Bools
    logprobs: dict[int, list[LogprobDict]] = field(default_factory=dict)
    draft_counts: Ints | None = None
    confidence: npt.NDArray[np.float32] | None = None

    def take(self, kept: Bools) -> StepResult:
        """The same for some of the emitting items, kept [n]."""
        return replace(self, items=self.items[kept], tokens=self.tokens[kept], num_tokens=self.num_tokens[kept], bad=self.bad[kept])
