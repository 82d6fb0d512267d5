"""A launch's shape, read from its staged plan: any process with the plan's bytes can run the launch."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.shape import Form, LaunchShape
from runahead.runtime.plan import HEADER

_unpack_header: Final = HEADER.struct.unpack_from
_PLAIN, _FULL = Form.PLAIN, Form.FULL  # members of an enum are looked up slowly


def shape_of(body: NDArray[np.int32]) -> LaunchShape:
    """Return the shape of the launch whose plan is in this staging slot, int32 [plan_words]. The engine calls this too,
    so that a process with only the plan's bytes enqueues the same launch."""
    number, sample_rows, needs_full, rows, tokens, is_decode, prompt_logprobs, drafts, sample_drafts, *_, guesses = (
        _unpack_header(body.data)
    )
    form = _FULL if needs_full else _PLAIN
    return LaunchShape(
        number, sample_rows, form, rows, tokens, is_decode == 1, prompt_logprobs == 1, drafts, sample_drafts,
        needs_full == 2, drafts > guesses == 0,
    )  # fmt: skip
