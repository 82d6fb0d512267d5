"""What is known of the next launch before it is planned: how many calls of the driver it may take."""

from __future__ import annotations

from runahead.cuda_graphs.device import Device
from runahead.cuda_graphs.shape import Form, LaunchShape
from runahead.runtime.scheduler.scheduler import Scheduler


def prompt_calls(device: Device, scheduler: Scheduler) -> int:
    """Of a launch with prompt tokens, at most: the largest there may be, or one that is no graph since it leaves
    log-probabilities of a prompt, without the calls for these."""
    rows = scheduler.rows.max_rows
    largest = LaunchShape(0, rows, Form.FULL, rows, rows + scheduler.limits.max_prefill_tokens, is_decode=False)
    in_pieces = largest._replace(rows=1, tokens=1, prompt_logprobs=True)
    return max(device.calls(largest), device.calls(in_pieces))
