"""A launch's shape is read from the bytes of its plan, and from nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.runtime.plan import PLAN_WORDS, Chunk, LaunchPlan, shape_of, stage
from runahead.runtime.scheduler.plan_builder import PlanBuilder

NO_APPENDS = np.zeros((0, 3), np.int32)
SHAPES = st.builds(
    LaunchShape,
    number=st.integers(0, (1 << 63) - 1),
    sample_rows=st.integers(0, 1 << 16),
    form=st.sampled_from(Form),
    rows=st.integers(0, 300),
    tokens=st.integers(0, (1 << 31) - 1),
    is_decode=st.booleans(),
    prompt_logprobs=st.booleans(),
    drafts=st.integers(0, 7),
    sample_drafts=st.integers(0, 7),
    masked=st.booleans(),
    forced=st.booleans(),
).map(
    lambda shape: shape._replace(
        masked=shape.masked and shape.form is Form.FULL, forced=shape.forced and shape.drafts > 0
    )
)


@settings(deadline=None)
@given(shape=SHAPES, stale=st.integers(-(1 << 31), (1 << 31) - 1), guesses=st.integers(1, 7))
def test_every_shape_comes_back_from_the_bytes_of_its_plan(shape: LaunchShape, stale: int, guesses: int) -> None:
    """stale: in every word of the slot before."""
    plan = LaunchPlan(
        shape.number,
        np.arange(shape.rows, dtype=np.int32),
        np.ones(shape.rows, np.bool_),
        True,
        NO_APPENDS,
        tokens=shape.tokens,
        sample_rows=shape.sample_rows,
        needs_full=shape.form is Form.FULL,
        is_decode=shape.is_decode,
        prompt_logprobs=shape.prompt_logprobs,
        drafts=shape.drafts,
        sample_drafts=shape.sample_drafts,
        masked=shape.masked,
        guesses=0 if shape.forced else min(guesses, shape.drafts),
    )
    body = np.full(PLAN_WORDS, stale, np.int32)
    stage(plan, body, np.zeros(0, np.int32))
    sent = np.frombuffer(body.tobytes(), np.int32)  # to another process, say
    assert shape_of(sent) == shape
    assert repr(shape_of(sent)) == repr(shape), "true and false, and no 1 and 0"


@pytest.mark.parametrize(
    ("decoding", "chunks", "tokens", "is_decode"),
    [
        (2, [], 6, True),
        (2, [3], 9, True),
        (2, [1], 7, False),
        (1, [1, 5], 9, False),
        (0, [3], 3, False),
        (0, [], 0, False),
    ],
    ids=[
        "rows that verify",
        "a chunk as long as a run",
        "a short chunk",
        "as many tokens by chance",
        "nobody decodes",
        "no rows",
    ],
)
def test_rows_with_drafts_make_a_decode_launch_although_they_have_more_tokens_than_rows(
    decoding: int, chunks: list[int], tokens: int, is_decode: bool
) -> None:
    builder = PlanBuilder(1, PLAN_WORDS, 256, 64)
    builder.decode(np.arange(decoding, dtype=np.int32), drafts=2)
    for place, count in enumerate(chunks):
        builder.chunk(Chunk(decoding + place, 0, np.zeros(count, np.int32), True))
    plan = builder.build(np.zeros(0, np.int32), np.zeros(0, np.bool_), sample_drafts=1)
    body = np.zeros(PLAN_WORDS, np.int32)
    stage(plan, body, np.zeros(64, np.int32))
    shape = shape_of(body)
    assert (shape.rows, shape.tokens, shape.is_decode) == (decoding + len(chunks), tokens, is_decode)
    assert (shape.drafts, shape.sample_drafts) == (2 if decoding else 0, 1)
