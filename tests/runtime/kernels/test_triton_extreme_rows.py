"""The sampler in Triton at the edges of float32 and of what a request may ask for: the verdicts of the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.kernels.extreme_rows import VOCAB, beyond_what_is_valid, logits, specs, split
from tests.runtime.kernels.sampling_oracle import RowSpec, penalties_of, state_of
from tests.runtime.kernels.triton_device import on, triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.device import Form  # noqa: E402
from runahead.runtime.kernels.reference.sampling import Sampled, sample_rows  # noqa: E402
from runahead.runtime.kernels.triton.sampling.sampler import make_sampler_buffers, sample_rows_cuda  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",
    "ignore:(overflow|invalid value) encountered:RuntimeWarning",
)

MAX_TOP = 4


def agrees(raw: torch.Tensor, rows: list[RowSpec], form: Form = Form.FULL) -> Sampled:
    """Sample on the device over scratch full of NaN, compare, and return the reference's result."""
    state, penalties, slots = state_of(rows, VOCAB), penalties_of(rows, VOCAB), torch.arange(len(rows))
    expected = sample_rows(raw, state, penalties, slots, form, MAX_TOP)
    buffers = make_sampler_buffers(len(rows), VOCAB, MAX_TOP, DEVICE)
    buffers.edited_logits.fill_(float("nan"))
    buffers.edited_max.fill_(float("nan"))
    found = sample_rows_cuda(raw.to(DEVICE), on(DEVICE, state), on(DEVICE, penalties), slots.to(DEVICE), form, buffers)
    assert found.finite.tolist() == expected.finite.tolist()
    assert found.tokens.tolist() == expected.tokens.tolist()
    if form is Form.FULL:
        assert found.logprob is not None
        assert found.top_ids is not None
        assert found.top_ids.tolist() == expected.top_ids.tolist()  # type: ignore[union-attr]
        torch.testing.assert_close(found.logprob.cpu(), expected.logprob, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found.top_logprobs.cpu(), expected.top_logprobs, atol=1e-6, rtol=1e-6)  # type: ignore[union-attr]
    return expected


def test_penalties_that_leave_float32_end_their_own_rows() -> None:
    raw = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    raw[1:5, 5], raw[1:5, 6] = 3e38, -3e38
    rows = [
        RowSpec(temperature=0.9, seed=8, top_p=0.9, logprobs=2),
        RowSpec(repetition=0.01, prompt=(5,), logprobs=2),
        RowSpec(repetition=100.0, said=(6,), temperature=0.7),
        RowSpec(repetition=0.01, said=(5,), allowed=(1, 2), temperature=0.7, top_k=3),
        RowSpec(repetition=100.0, prompt=tuple(range(VOCAB)), temperature=0.7, top_p=0.5, logprobs=0),
        RowSpec(),
    ]
    assert agrees(raw, rows).finite.tolist() == [True, False, False, False, False, True]


def test_parameters_that_nobody_may_send_end_their_own_rows_at_most() -> None:
    agrees(*beyond_what_is_valid())


@pytest.mark.parametrize("share", [1e-45, 1e-50, 0.0])
def test_a_tiny_top_p_leaves_the_first_of_the_most_likely_tokens(share: float) -> None:
    raw = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    raw[0, [5, 9, 20]] = 7.0  # alike
    rows = [RowSpec(temperature=1.0, top_p=share, seed=4), RowSpec(temperature=1.0, top_p=share), RowSpec()]
    assert agrees(raw, rows).tokens.tolist() == [5, int(raw[1].argmax()), int(raw[2].argmax())]


@settings(
    deadline=None,
    max_examples=8 if DEVICE.type == "cpu" else 200,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(st.tuples(logits(), specs), min_size=6, max_size=6))
def test_extreme_rows_have_the_tokens_and_the_flags_of_the_reference(
    batch: list[tuple[list[float], RowSpec]],
) -> None:
    agrees(*split(batch))
    agrees(*split(batch), Form.PLAIN)
