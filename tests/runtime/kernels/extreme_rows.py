"""Rows at the edges of what a request may ask for, over logits at the edges of float32."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from hypothesis import strategies as st

from runahead.runtime.wire.parameters import MAX_STOP_IDS
from runahead.service.contract.limits import LIMITS
from tests.runtime.kernels.sampling_oracle import RowSpec

VOCAB: Final = 37
HIGHEST: Final = float(np.finfo(np.float32).max)
_EDGES: Final = (HIGHEST, -HIGHEST, 3e38, -3e38, 1e37, -1e37, 1e30, 100.0, 1.0, -1.0, 1e-38, 1e-45, 0.0, -0.0)

_logit = st.one_of(st.sampled_from(_EDGES), st.floats(width=32, allow_nan=False, allow_infinity=False))
_tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12).map(tuple)
_distinct = st.lists(st.integers(0, VOCAB - 1), unique=True, max_size=MAX_STOP_IDS).map(tuple)


@st.composite
def logits(draw: st.DrawFn) -> list[float]:
    """Of a row, [VOCAB]: all alike, all alike but some, or any."""
    row = [draw(_logit)] * VOCAB
    for token, value in draw(st.dictionaries(st.integers(0, VOCAB - 1), _logit, max_size=VOCAB)).items():
        row[token] = value
    return row


def _bounds(low: float, high: float, *others: float) -> st.SearchStrategy[float]:
    return st.sampled_from((low, high, *others))


specs = st.builds(
    RowSpec,
    temperature=_bounds(LIMITS.temperature_min, LIMITS.temperature_max, 0.0, 0.0, 1.0),
    top_k=st.sampled_from((0, 0, 1, 5, VOCAB - 1, VOCAB)),
    top_p=st.sampled_from((1.0, 1.0, 0.5, 1e-45, 1e-50, 5e-324, 0.99)),
    min_p=st.sampled_from((0.0, 0.0, 1e-45, 1e-50, 5e-324, 0.02, 1.0)),
    seed=st.integers(0, 2**64 - 1),
    position=st.just(9),
    min_position=st.sampled_from((0, 20)),
    logprobs=st.sampled_from((-1, 0, 4)),
    stop_ids=_distinct,
    bias=st.dictionaries(
        st.integers(0, VOCAB - 1), _bounds(-LIMITS.logit_bias_value, LIMITS.logit_bias_value, 0.5), max_size=5
    ).map(lambda found: tuple(found.items())),
    allowed=st.one_of(st.none(), _distinct.filter(len)),
    repetition=_bounds(LIMITS.repetition_penalty_min, LIMITS.repetition_penalty_max, 1.0, 1.0),
    presence=_bounds(-LIMITS.additive_penalty, LIMITS.additive_penalty, 0.0, 0.0),
    frequency=_bounds(-LIMITS.additive_penalty, LIMITS.additive_penalty, 0.0, 0.0),
    prompt=_tokens,
    said=_tokens,
)
batches = st.lists(st.tuples(logits(), specs), min_size=1, max_size=6)


def split(batch: list[tuple[list[float], RowSpec]]) -> tuple[torch.Tensor, list[RowSpec]]:
    """Logits, float32 [rows, VOCAB], and what their rows ask for."""
    return torch.tensor([row for row, _ in batch], dtype=torch.float32), [spec for _, spec in batch]


def beyond_what_is_valid() -> tuple[torch.Tensor, list[RowSpec]]:
    """Parameters that the service refuses, and that must not disturb a neighbour should a kernel meet them."""
    rows = [
        RowSpec(temperature=1e-38, seed=1),
        RowSpec(temperature=1e-45, seed=2, top_p=0.5),
        RowSpec(bias=((0, 3e38), (1, -3e38)), temperature=1.0),
        RowSpec(bias=((0, -HIGHEST), (2, -3e38)), allowed=(0, 1)),
        RowSpec(repetition=1e30, said=(0, 1), prompt=(2,), temperature=0.7),
        RowSpec(repetition=1e-30, said=(0, 1), prompt=(2,)),
        RowSpec(presence=3e38, frequency=3e38, said=(0, 0, 1)),
        RowSpec(presence=-3e38, frequency=3e38, said=(0, 0, 1), temperature=1.0, top_k=3),
        RowSpec(temperature=1.0, seed=3, logprobs=4),
    ]
    row = torch.linspace(-1.0, 1.0, VOCAB) * 3e38
    row[:3] = torch.tensor([3e38, -3e38, 2e38])
    return row.repeat(len(rows), 1), rows
