"""How many calls of the driver a launch with prompt tokens is taken for before it is planned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from runahead.cuda_graphs.buckets import Buckets
from runahead.cuda_graphs.device import LaunchShape
from runahead.runtime.engine.prompt_calls import prompt_calls

IN_PIECES = 270


@pytest.mark.parametrize("most", [20, 256, 4096], ids=["few", "as many as a graph holds", "more"])
def test_a_launch_with_prompts_is_taken_for_one_in_pieces_without_log_probabilities(most: int) -> None:
    buckets = Buckets.up_to(64, 64 + most)

    def calls(shape: LaunchShape) -> int:
        return buckets.calls(shape, IN_PIECES)

    scheduler = SimpleNamespace(rows=SimpleNamespace(max_rows=64), limits=SimpleNamespace(max_prefill_tokens=most))
    device: Any = SimpleNamespace(calls=calls)
    assert prompt_calls(device, cast(Any, scheduler)) == IN_PIECES
