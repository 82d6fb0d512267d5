"""The sampler in Triton against the reference: the same tokens to the bit, log-probabilities within rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.runtime.kernels.sampling_oracle import RowSpec, penalties_of, random_spec, state_of
from tests.runtime.kernels.triton_device import on, synchronising_calls_raise, triton_device

DEVICE = triton_device()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from runahead.cuda_graphs.device import Form  # noqa: E402
from runahead.runtime.kernels.reference import philox  # noqa: E402
from runahead.runtime.kernels.reference.sampling import Sampled, sample_rows  # noqa: E402
from runahead.runtime.kernels.triton.sampling.philox import block_words, exp32, gumbel, log32  # noqa: E402
from runahead.runtime.kernels.triton.sampling.sampler import make_sampler_buffers, sample_rows_cuda  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

MAX_TOP = 20


@triton.jit
def _noise_kernel(seed, position, words, noise, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    four = block_words(tl.load(seed), tl.load(position), block)
    for index in tl.static_range(4):
        tl.store(words + block * 4 + index, four[index].to(tl.int64))
        tl.store(noise + block * 4 + index, gumbel(four[index]))


@triton.jit
def _math_kernel(x, exponential, logarithm, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i)
    tl.store(exponential + i, exp32(-value))
    tl.store(logarithm + i, log32(value))


def random_logits(rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def mixed_specs(count: int, vocab_size: int, seed: int) -> list[RowSpec]:
    random = np.random.default_rng(seed)
    return [random_spec(random, vocab_size) for _ in range(count)]


def agrees(logits: torch.Tensor, specs: list[RowSpec], form: Form = Form.FULL) -> Sampled:
    """Sample on the device, check every column against the reference, and return the reference's result."""
    state = state_of(specs, logits.shape[1])
    slots = torch.arange(len(specs))
    penalties = penalties_of(specs, logits.shape[1])
    expected = sample_rows(logits, state, penalties, slots, form, MAX_TOP)
    buffers = make_sampler_buffers(len(specs), logits.shape[1], MAX_TOP, DEVICE)
    found = sample_rows_cuda(
        logits.to(DEVICE), on(DEVICE, state), on(DEVICE, penalties), slots.to(DEVICE), form, buffers
    )
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.finite.tolist() == expected.finite.tolist()
    if form is Form.PLAIN:
        assert found.logprob is None
        return expected
    assert found.logprob is not None
    assert found.top_ids is not None
    assert found.top_logprobs is not None
    assert found.top_ids.tolist() == expected.top_ids.tolist()  # type: ignore[union-attr]
    torch.testing.assert_close(found.logprob.cpu(), expected.logprob, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.top_logprobs.cpu(), expected.top_logprobs, atol=1e-6, rtol=1e-6)
    return expected


def test_words_and_noise_are_those_of_the_reference_to_the_bit() -> None:
    vocab_size = 4096
    for seed, position in ((0, 0), (-1, 2**31 - 1), (0x0123456789ABCDEF, 77), (-(2**63), 5)):
        words = torch.zeros(vocab_size, dtype=torch.int64, device=DEVICE)
        noise = torch.zeros(vocab_size, dtype=torch.float32, device=DEVICE)
        _noise_kernel[(4,)](
            torch.tensor([seed], device=DEVICE),
            torch.tensor([position], dtype=torch.int32, device=DEVICE),
            words,
            noise,
            BLOCK=256,
            enable_fp_fusion=False,
        )
        expected = philox.row_words(np.array([seed], np.int64), np.array([position], np.int64), vocab_size)[0]
        assert np.array_equal(words.cpu().numpy(), expected.astype(np.int64))
        assert noise.cpu().numpy().tobytes() == philox.gumbel(expected).tobytes()


def test_exp_and_log_are_those_of_the_reference_to_the_bit() -> None:
    x = torch.cat([torch.rand(4096) * 90, torch.rand(4096), torch.rand(4096) * 2**-20, torch.full((4096,), 1.0)])
    x = x.clamp_min(2.0**-24).to(DEVICE)
    exponential, logarithm = torch.zeros_like(x), torch.zeros_like(x)
    _math_kernel[(16,)](x, exponential, logarithm, BLOCK=1024, enable_fp_fusion=False)
    assert exponential.cpu().numpy().tobytes() == philox.exp32(-x.cpu().numpy()).tobytes()
    assert logarithm.cpu().numpy().tobytes() == philox.log32(x.cpu().numpy()).tobytes()


@pytest.mark.parametrize("vocab_size", [33, 2048, pytest.param(5001, marks=pytest.mark.large)])
def test_rows_of_every_kind_get_the_tokens_of_the_reference(vocab_size: int) -> None:
    specs = mixed_specs(32, vocab_size, seed=vocab_size)
    agrees(random_logits(32, vocab_size, seed=vocab_size), specs, Form.FULL)
    agrees(random_logits(32, vocab_size, seed=vocab_size), specs, Form.PLAIN)


@pytest.mark.parametrize("form", list(Form))
def test_a_vocabulary_of_one_token_and_no_rows_at_all_are_fine(form: Form) -> None:
    agrees(torch.zeros(2, 1), [RowSpec(), RowSpec(temperature=1.0, top_p=0.5, logprobs=3)], form)
    agrees(torch.zeros(0, 40), [], form)


def test_ties_at_every_border_go_to_the_lowest_ids() -> None:
    vocab_size, count = 3000, 30
    logits = (random_logits(count, vocab_size, seed=1) * 0.7).round()  # few distinct values: ties everywhere
    logits[::5] = 0.0
    logits[1, ::7] = -0.0
    specs = [
        RowSpec(
            temperature=1.0 if row % 6 else 0.0,
            top_k=(0, 1, 13, 700)[row % 4],
            top_p=(1.0, 0.3, 0.97)[row % 3],
            min_p=(0.0, 0.2)[row % 2],
            seed=row,
            position=row,
            logprobs=row % 21,
        )
        for row in range(count)
    ]
    agrees(logits, specs)


def test_flat_and_steep_rows_find_the_border_of_the_reference() -> None:
    specs = [
        RowSpec(temperature=1.0, top_p=top_p, top_k=top_k, seed=index, position=3)
        for index, (top_p, top_k) in enumerate([(0.5, 0), (0.999, 0), (0.9, 50), (1e-20, 0), (1.0, 2999), (0.6, 2999)])
    ]
    for scale in (1e-6, 0.1, 30.0, 1e4):
        agrees(random_logits(len(specs), 3000, seed=2, scale=scale), specs)


@pytest.mark.parametrize("form", list(Form))
def test_non_finite_and_dead_rows_disturb_no_other(form: Form) -> None:
    specs = mixed_specs(16, 2500, seed=3)
    logits = random_logits(16, 2500, seed=3)
    clean = agrees(logits, specs, form)
    for row, (column, value) in enumerate([(0, float("nan")), (2499, float("inf")), (2047, float("-inf"))]):
        logits[row * 5, column] = value
    specs = [replace(spec, alive=row not in (3, 10)) for row, spec in enumerate(specs)]
    broken = agrees(logits, specs, form)
    assert not broken.finite[[0, 5]].any()
    others = [row for row in range(16) if row not in (0, 3, 5, 10)]
    assert broken.tokens[others].tolist() == clean.tokens[others].tolist()


def test_masks_that_leave_one_token_or_none_are_those_of_the_reference() -> None:
    base = RowSpec(position=3, min_position=8, stop_ids=(60, 2050, 70), temperature=1.0, seed=5)
    expected = agrees(
        random_logits(5, 2100, seed=4),
        [
            replace(base, allowed=(2050, 70)),
            replace(base, allowed=(2050, 60), temperature=0.0, top_p=0.5),
            replace(base, allowed=(2050, 60), top_k=3, logprobs=2),
            replace(base, allowed=()),
            replace(base, allowed=(2050, 2099), bias=((2099, -50.0), (60, 1e4))),
        ],
    )
    assert expected.tokens.tolist() == [70, 60, 60, 0, 2099]


def test_logits_may_be_kept_by_row_slot() -> None:
    specs = mixed_specs(9, 300, seed=6)
    state, penalties = state_of(specs, 300), penalties_of(specs, 300)
    by_slot = random_logits(10, 300, seed=6)
    slots = torch.tensor([7, 2, 9, 0, 9], dtype=torch.int32)  # 9 is the null row of padding
    expected = sample_rows(by_slot[slots.long()], state, penalties, slots.long(), Form.FULL, 4)
    buffers = make_sampler_buffers(8, 300, 4, DEVICE)
    slots = slots.to(DEVICE)
    found = sample_rows_cuda(
        by_slot.to(DEVICE), on(DEVICE, state), on(DEVICE, penalties), slots, Form.FULL, buffers, logit_rows=slots
    )
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.top_ids is not None
    assert expected.top_ids is not None
    assert found.top_ids.shape == (5, 4)
    assert found.top_ids.tolist() == expected.top_ids.tolist()


def test_a_row_gets_the_same_bits_alone_and_at_every_place_among_others() -> None:
    count, vocab_size = 12, 2100
    specs = mixed_specs(count, vocab_size, seed=7)
    logits = random_logits(count, vocab_size, seed=7).to(DEVICE)
    state, penalties = on(DEVICE, state_of(specs, vocab_size)), on(DEVICE, penalties_of(specs, vocab_size))
    buffers = make_sampler_buffers(count, vocab_size, MAX_TOP, DEVICE)
    for name in ("edited_logits", "guesses", "best_score", "partial_max", "edited_max"):
        getattr(buffers, name).fill_(float("nan"))  # nothing may be read that was not written

    def result(rows: list[int]) -> list[tuple[bytes, ...]]:
        index = torch.tensor(rows, device=DEVICE)
        found = sample_rows_cuda(logits[index], state, penalties, index, Form.FULL, buffers)
        columns = (found.tokens, found.finite, found.logprob, found.top_ids, found.top_logprobs)
        return [tuple(c[i].cpu().numpy().tobytes() for c in columns if c is not None) for i in range(len(rows))]

    alone = [result([row])[0] for row in range(count)]
    random = np.random.default_rng(8)
    for size in (2, 5, 12):
        rows = [int(row) for row in random.permutation(count)[:size]]
        assert result(rows) == [alone[row] for row in rows]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [4096, 151_936, 262_144])
def test_large_vocabularies_agree_with_the_reference_on_a_gpu(vocab_size: int) -> None:
    specs = mixed_specs(24, vocab_size, seed=9)
    for scale in (0.5, 3.0):
        agrees(random_logits(24, vocab_size, seed=9, scale=scale), specs, Form.FULL)
        agrees(random_logits(24, vocab_size, seed=9, scale=scale), specs, Form.PLAIN)


@pytest.mark.gpu
@pytest.mark.parametrize("form", list(Form))
def test_the_sampler_can_be_captured_and_replays_with_new_logits_and_state(form: Form) -> None:
    count, vocab_size = 16, 4096
    specs = mixed_specs(count, vocab_size, seed=10)
    cpu_state, cpu_penalties = state_of(specs, vocab_size), penalties_of(specs, vocab_size)
    state, penalties = on(DEVICE, cpu_state), on(DEVICE, cpu_penalties)
    slots = torch.arange(count, device=DEVICE)
    logits = random_logits(count, vocab_size, seed=10).to(DEVICE)
    buffers = make_sampler_buffers(count, vocab_size, MAX_TOP, DEVICE)
    sample_rows_cuda(logits, state, penalties, slots, form, buffers)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with synchronising_calls_raise(), torch.cuda.graph(graph):
        found = sample_rows_cuda(logits, state, penalties, slots, form, buffers)
    for step in range(5):
        fresh = random_logits(count, vocab_size, seed=100 + step)
        logits.copy_(fresh)
        cpu_state.seq_len.add_(1)
        state.seq_len.add_(1)
        graph.replay()
        expected = sample_rows(fresh, cpu_state, cpu_penalties, torch.arange(count), form, MAX_TOP)
        assert found.tokens.tolist() == expected.tokens.tolist()
        if expected.top_ids is not None:
            assert found.top_ids is not None
            assert found.top_ids.tolist() == expected.top_ids.tolist()
