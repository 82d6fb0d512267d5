"""What is known of the next launch before it is planned: how many calls of the driver it may take."""

from __future__ import annotations

from runahead.cuda_graphs.device import Device
from runahead.cuda_graphs.shape import Form, LaunchShape
from runahead.runtime.scheduler.scheduler import Scheduler


def prompt_calls(device: Device, scheduler: Scheduler) -> int:
    """Of a launch with prompt tokens, at most: of one that is no graph, as it may be whatever its size, without the
    calls for log-probabilities of prompts."""
    rows, tokens = scheduler.rows.max_rows, scheduler.limits.max_prefill_tokens
    # No graph holds a launch whose S looks at another number of drafts than its F has.
    return device.calls(LaunchShape(0, rows, Form.FULL, rows, rows + tokens, is_decode=False, sample_drafts=1))
