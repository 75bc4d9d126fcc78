"""Plain decoding: a policy that drafts nothing, so that it is no special path."""

from __future__ import annotations

from sparsespec.spec.base import DraftPolicy


class NoDraft(DraftPolicy):
    """Every step verifies zero drafts."""

    name = "none"
