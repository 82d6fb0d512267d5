"""Scores of attention and logits that a tanh bounds, by the Triton kernels: against float64 and the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.runtime.kernels.triton_device import TOLERANCE, relative_error, triton_device

DEVICE = triton_device()

import tests.runtime.kernels.test_triton_decode_attention as one_query  # noqa: E402
import tests.runtime.kernels.test_triton_line_attention as lines  # noqa: E402
from runahead.runtime.kernels.triton.attention.prefill_tuning import ChunkPlan  # noqa: E402
from runahead.runtime.kernels.triton.attention.ragged import chunk_attention  # noqa: E402
from runahead.runtime.kernels.triton.attention.schedule import AttentionPlan  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from tests.runtime.kernels.test_triton_attention import attention_of, bounded, paged  # noqa: E402

CAP = 1.5  # scores of random heads are as large: the tanh bends them
LENGTHS, QUERIES = [70, 1, 0, 45], [70, 1, 1, 13]
WINDOWS = [0, 20]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("plan", [None, lines.WHOLE], ids=["small tiles", "large tiles"])
def test_scores_of_chunks_are_bounded_before_keys_are_masked(plan: ChunkPlan | None, window: int) -> None:
    torch.manual_seed(5)
    kv, dtype, dim = paged(LENGTHS, 2, 16, 8, 32, torch.float32), torch.float32, 16
    q, batch = lines.random_queries(sum(QUERIES), 4, dim, dtype), lines.batch_of(kv, QUERIES)
    if plan is None:
        out = chunk_attention(
            q, kv.keys, kv.values, kv.tables, kv.seq_lens, batch.query_start_loc, dim**-0.5, window, CAP
        )
    else:
        out = lines.attend(q, kv, batch, window, plan, CAP)
    first = 0
    for row, (length, count) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        if length:
            expected, plain = (
                torch.stack(
                    [
                        attention_of(kv, row, q[first + i], length - count + i, dim**-0.5, window, cap)
                        for i in range(count)
                    ]
                )
                for cap in (CAP, 0.0)
            )
            assert relative_error(out[first : first + count], expected) < TOLERANCE[dtype]
            assert count == 1 or relative_error(plain, expected) > 1e-2, "as if nothing had to be bounded"
        first += count


@pytest.mark.parametrize("plan", one_query.PLANS[1:])
def test_scores_of_decode_rows_are_bounded(plan: AttentionPlan) -> None:
    torch.manual_seed(1)
    rows = one_query.make_rows(one_query.LENGTHS, one_query.SHAPES[0], torch.float32, window=50, normed=True)
    rows.weights = replace(rows.weights, score_cap=CAP)
    out = one_query.attend(rows, plan)
    for row, length in enumerate(one_query.LENGTHS):
        if length:
            assert relative_error(out[row], one_query.expected_of(rows, row)[0]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_logits_are_bounded_at_their_places_alone(rows: int) -> None:
    """Of one row, of few and of many."""
    torch.manual_seed(3)
    kernels, dtype = TritonKernelSet(), torch.bfloat16
    hidden, weight = (torch.randn(count, 64).to(DEVICE, dtype) for count in (rows, 130))
    out = torch.full((rows + 2, 130), 7.0, device=DEVICE)
    places = (torch.arange(rows, dtype=torch.int32, device=DEVICE) + 1).flip(0)
    kernels.logits_into(hidden, weight, out, places, 4.0)
    expected = bounded(hidden.double() @ weight.double().t(), 4.0)
    assert relative_error(out[places.long()], expected) < TOLERANCE[dtype]
    assert out[places.long()].abs().max() <= 4.0
    assert out[0].eq(7.0).all() and out[-1].eq(7.0).all()


def test_a_logit_that_is_no_number_stays_none_and_large_ones_become_the_cap() -> None:
    logits = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1e30, -90.0, 0.0]], device=DEVICE)
    TritonKernelSet().bound(logits, 30.0)
    assert logits[0, 0].isnan()
    assert logits[0, 1:].tolist() == pytest.approx([30.0, -30.0, 30.0, -29.85, 0.0], abs=5e-3)
