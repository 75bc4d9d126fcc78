"""Test doors: models and hooks with which the engine's promises can be checked. Public, and used by its own tests.

    from sparsespec.testing import override_drafts, scripted, tiny_qwen3

Tiny random models (`tiny_llama`, `tiny_qwen2`, `tiny_qwen3`) and draft heads for them (`tiny_eagle3`), a target that follows
a script (`scripted`), drafts of one's own (`override_drafts`), single steps (`step`), preemption at will
(`force_preemption`), page counts, and NaN in all memory that nobody should read (`poison_free_pages`); late and failing
copies (`use_copier` with `LateCopier` or `FailingCopier`), a host without memory (`no_host_memory`), the integrity check
of both pools (`check_integrity`) and a device of known speed (`timed_device`).
"""

from __future__ import annotations

from sparsespec.testing.clock import Clock, timed_device
from sparsespec.testing.doors import (
    DraftOverride,
    PageCounts,
    force_preemption,
    override_drafts,
    page_counts,
    poison_free_pages,
    running_requests,
    step,
)
from sparsespec.testing.faults import FailingCopier, LateCopier, check_integrity, no_host_memory, use_copier
from sparsespec.testing.scripted import Script, ScriptedTarget, Wanted, scripted
from sparsespec.testing.tiny import tiny_eagle3, tiny_llama, tiny_model, tiny_qwen2, tiny_qwen3

__all__ = [
    "Clock",
    "DraftOverride",
    "FailingCopier",
    "LateCopier",
    "PageCounts",
    "Script",
    "ScriptedTarget",
    "Wanted",
    "check_integrity",
    "force_preemption",
    "no_host_memory",
    "override_drafts",
    "page_counts",
    "poison_free_pages",
    "running_requests",
    "scripted",
    "step",
    "timed_device",
    "tiny_eagle3",
    "tiny_llama",
    "tiny_model",
    "tiny_qwen2",
    "tiny_qwen3",
    "use_copier",
]
