"""How many driver calls the next launch may take, before it is planned."""

from __future__ import annotations

from runahead.cuda_graphs.device import Device, Form, LaunchShape
from runahead.runtime.scheduler.scheduler import Scheduler


def prompt_calls(device: Device, scheduler: Scheduler) -> int:
    """Return the most driver calls of a launch with prompt tokens: of one without a graph, but not counting calls for
    log-probabilities of prompts."""
    rows, tokens = scheduler.rows.max_rows, scheduler.limits.max_prefill_tokens
    # A launch whose S verifies another number of drafts than its F has is never a graph.
    return device.calls(LaunchShape(0, rows, Form.FULL, rows, rows + tokens, is_decode=False, sample_drafts=1))
