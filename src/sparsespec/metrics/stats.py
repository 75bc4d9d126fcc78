"""What stats() reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsespec.runner.model_runner import ModelRunner
    from sparsespec.scheduler.scheduler import Scheduler


def collect_stats(scheduler: Scheduler, runner: ModelRunner, seconds: dict[str, float],
                  draft_length: int) -> dict[str, Any]:
    """Counters since the start, gauges of now.

    num_drafts: rounds that drafted; num_accepted_tokens excludes the bonus token; accepted_per_position: how often the
    draft at each position was accepted, of drafted_per_position. num_stalled_rows: rows that sat an iteration out while a
    copy made room; num_stalled_slots: requests that sat one out as their last result was not known yet. *_pages_free counts
    pages that hold nothing but cached prefixes (cached_pages) as free. seconds_*: by stage. execute is the device's, with
    prepare to select as its parts, and may go on beside the CPU's stages; wait is what the CPU waits for it.
    """
    c, t, memory = scheduler.counters, runner.times, scheduler.memory
    return {
        "iterations": c.iterations, "gemm_rows": c.gemm_rows, "num_drafts": c.num_drafts,
        "num_draft_tokens": c.num_draft_tokens, "num_accepted_tokens": c.num_accepted_tokens,
        "accepted_per_position": list(c.accepted_per_position), "drafted_per_position": list(c.drafted_per_position),
        "num_emitted_tokens": c.num_emitted_tokens,
        "num_preemptions": c.num_preemptions, "num_recomputed_tokens": c.num_recomputed_tokens,
        "num_cached_tokens": c.num_cached_tokens, "num_stalled_rows": c.num_stalled_rows,
        "num_stalled_slots": c.num_stalled_slots,
        "offloaded_tokens": memory.swapper.offloaded_tokens, "restored_tokens": memory.swapper.restored_tokens,
        "spilled_pages": memory.prefixes.spilled_pages, "failed_copies": memory.transfers.num_failed,
        "device_pages_total": memory.pages.allocator.num_pages, "device_pages_free": memory.num_free,
        "host_pages_total": memory.host.num_pages, "host_pages_free": memory.num_host_free,
        "cached_pages": len(memory.prefixes.device) + len(memory.prefixes.host),
        "running": scheduler.num_running, "waiting": len(scheduler.waiting), "swapped": len(memory.swapper),
        "kv_bytes_read": t.kv_bytes_read, "draft_length": draft_length,
        "seconds_schedule": seconds["schedule"], "seconds_execute": seconds["execute"], "seconds_commit": seconds["commit"],
        "seconds_wait": seconds["wait"],
        "seconds_prepare": t.prepare, "seconds_forward": t.forward, "seconds_sample": t.sample, "seconds_select": t.select,
    }
