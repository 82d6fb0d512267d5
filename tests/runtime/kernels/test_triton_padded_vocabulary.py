"""Ids that may not be sampled: the reference samples without their logits, and Triton finds the same in whole rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.kernels.sampling_oracle import penalties_of, random_spec, state_of
from tests.runtime.kernels.triton_device import on, triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.device import Form  # noqa: E402
from runahead.cuda_graphs.rings import RingLayout, allocate_rings  # noqa: E402
from runahead.runtime.kernels.reference.forward import ReferenceKernels  # noqa: E402
from runahead.runtime.kernels.reference.sampling import sample_rows  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.kernels.triton.sampling.sampler import make_sampler_buffers, sample_rows_cuda  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from runahead.runtime.plan import PLAN_WORDS  # noqa: E402
from runahead.runtime.programs.cpu.program import HostProgram  # noqa: E402
from runahead.runtime.programs.cuda.program import TritonProgram  # noqa: E402
from runahead.runtime.wire.parameters import SamplingParams  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402
from tests.runtime.launches import Launches, Outcome, over_program  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

TOP = 5
EACH, BOUND = 4, 130
CONFIG = gpu_chain.small_config(max_position_embeddings=EACH * 16, num_layers=1, windows=(0,))
SIZES: dict[str, Any] = {"max_rows": 3, "num_blocks": 3 * EACH + 1, "block_size": 16, "context_length": EACH * 16}


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize(("vocab", "bound", "rows"), [(70, 41, 32), (4160, 4096, 12), (4200, 2047, 12)])
def test_rows_of_every_kind_get_the_tokens_of_rows_without_padding(
    vocab: int, bound: int, rows: int, form: Form
) -> None:
    random = np.random.default_rng(vocab)
    specs = [random_spec(random, bound) for _ in range(rows)]
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits[:, bound:] += 50
    logits[0, bound:] = float("nan")
    logits[1, bound // 2] = float("nan")
    slots, state, penalties = torch.arange(rows), state_of(specs, vocab), penalties_of(specs, vocab)
    expected = sample_rows(logits[:, :bound], state, penalties, slots, form, TOP)
    assert int(expected.tokens.max()) < bound
    buffers = make_sampler_buffers(rows, vocab, TOP, DEVICE, bound)
    on_gpu = logits.to(DEVICE)
    for _ in range(2):  # a row that is held is sampled again from the same logits
        found = sample_rows_cuda(on_gpu, on(DEVICE, state), on(DEVICE, penalties), slots.to(DEVICE), form, buffers)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.finite.tolist() == expected.finite.tolist()
        if form is Form.FULL:
            assert found.top_ids is not None and found.logprob is not None and found.top_logprobs is not None
            assert found.top_ids.tolist() == expected.top_ids.tolist()  # type: ignore[union-attr]
            torch.testing.assert_close(found.logprob.cpu(), expected.logprob, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(found.top_logprobs.cpu(), expected.top_logprobs, atol=1e-6, rtol=1e-6)


def play(is_triton: bool, bound: int | None) -> list[Outcome]:
    """A row that is greedy and asks for log-probabilities, and one that draws. The head likes the padding most."""
    weights = gpu_chain.random_weights(CONFIG)
    assert weights.lm_head is not weights.embedding
    weights.lm_head[BOUND:] *= 20
    rings = allocate_rings(RingLayout(4, PLAN_WORDS, 4096, 3, TOP, prompt_tokens=64))
    if is_triton:
        model = Decoder(CONFIG, gpu_chain.moved(weights, DEVICE), TritonKernelSet())
        run = over_program(TritonProgram(model, rings, max_tokens=64, sampled_vocab=bound, **SIZES))
    else:
        run = over_program(
            HostProgram(Decoder(CONFIG, weights, ReferenceKernels()), rings, sampled_vocab=bound, **SIZES)
        )
    launches = Launches(run, rings, CONFIG.vocab_size, EACH)
    launches.begin(0, [5, 9, BOUND + 1, 7], SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=2))
    launches.begin(1, [3, 11, 8], SamplingParams(temperature=1.0, seed=7))
    return [launches.launch({0: 4, 1: 3}), *(launches.launch({0: 1, 1: 1}) for _ in range(6))]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="rings in ordinary memory")
@torch.inference_mode()
def test_programs_sample_no_padding_and_give_its_tokens_of_a_prompt_no_probability() -> None:
    free = play(False, None)
    assert any(token >= BOUND for outcome in free for token in outcome.tokens.values())
    expected, found = play(False, BOUND), play(True, BOUND)
    for reference, outcome in zip(expected, found, strict=True):
        assert outcome.tokens == reference.tokens and all(token < BOUND for token in outcome.tokens.values())
        assert outcome.finite == reference.finite
        for cell in (outcome.runs | reference.runs).get(0, []):
            assert max(cell.top_ids) < BOUND and -20 < cell.logprob < 0
    for outcome in (expected[0], found[0]):
        assert [entry.logprob == -np.inf for entry in outcome.prompt[0]] == [False, True, False]
        assert all(max(entry.top_ids) < BOUND for entry in outcome.prompt[0])
