"""Launches of models with experts by the Triton kernels, of every kind, against the reference."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.reference.forward import ReferenceKernels  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.blocks.dense import DenseConfig  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402
from tests.runtime.kernels.expert_configs import GLM4_MOE  # noqa: E402
from tests.runtime.kernels.matrix_units import multiply_as_matrix_units  # noqa: E402
from tests.runtime.kernels.test_triton_decode_streams import (  # noqa: E402
    BLOCK_SIZE,
    BLOCKS_A_ROW,
    ERROR,
    HALF,
    batch_of,
    decoder,
    ragged_batch,
)
from tests.runtime.kernels.test_triton_exact_rows import Watched, crowds, differing  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LENGTHS = (31, 0, 20, 25, 0, 39, 17, 18, 19)
# A near tie of a router may send a token elsewhere; `test_triton_expert_layers.py` gives both the same scores.
NEAR = {**ERROR, HALF: 0.1, torch.float16: 0.1}


def config_of(architecture: str, chosen: int = 3) -> DenseConfig:
    """Two layers of which the second has experts, or both; as many experts as no power of two."""
    if architecture == "Glm4MoeForCausalLM":
        return gpu_chain.small_config(**GLM4_MOE)
    both = architecture == "MixtralForCausalLM"
    return gpu_chain.small_config(
        architecture=architecture,
        windows=(0, 24),
        intermediate_size=128,
        experts=11,
        chosen=chosen,
        expert_size=64,
        renormalised=both,
        sparse=(both, True),
    )


def pair(architecture: str, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """The same model by the Triton kernels and by the reference."""
    config = config_of(architecture)
    return decoder(config, TritonKernelSet(), dtype), decoder(config, ReferenceKernels(), torch.float32)


KINDS = ((1, HALF), (3, HALF), (3, torch.float32), (3, torch.float16))
FURTHER = ((1, torch.float32), (9, HALF), (1, torch.float16))
LAUNCHES = [
    *itertools.product(("MixtralForCausalLM", "Qwen3MoeForCausalLM"), (*KINDS, *FURTHER)),
    *itertools.product(("Glm4MoeForCausalLM",), KINDS),
]
# Every architecture with a few rows, and each kind by one; the others are the large tests'.
OFTEN = (
    ("MixtralForCausalLM", KINDS[0]),
    ("Qwen3MoeForCausalLM", KINDS[2]),
    ("Qwen3MoeForCausalLM", FURTHER[1]),
    ("Qwen3MoeForCausalLM", FURTHER[2]),
)


@pytest.mark.parametrize(
    ("architecture", "rows", "dtype"),
    [
        pytest.param(name, *launch, marks=() if launch is KINDS[1] or (name, launch) in OFTEN else pytest.mark.large)
        for name, launch in LAUNCHES
    ],
)
def test_decode_launches_between_chunks(architecture: str, rows: int, dtype: torch.dtype) -> None:
    lengths, found = list(LENGTHS[:rows]), []
    for model in pair(architecture, dtype):
        cache = model.make_cache(rows * BLOCKS_A_ROW + 1, BLOCK_SIZE)
        model.forward(batch_of([max(n - 1, 0) for n in lengths], 16, model.device), cache)
        decodes = batch_of(lengths, 1, model.device)
        logits = [model.logits(model.forward(decodes, cache))]
        after = batch_of([n + 8 if n else 0 for n in lengths], 8, model.device)
        logits.append(model.logits(model.forward(after, cache)).view(rows, 8, -1)[:, -1])
        found.append(torch.stack(logits).cpu())
    alive = torch.tensor(lengths) > 0
    for launch in range(2):
        assert relative_error(found[0][launch][alive], found[1][launch][alive]) < NEAR[dtype]


def test_launches_of_decode_rows_and_chunks() -> None:
    decodes, lengths, queries = [True, False, False, True, True], [33, 21, 17, 0, 28], [1, 9, 1, 1, 1]
    found = []
    for model in pair("Qwen3MoeForCausalLM", HALF):
        cache = model.make_cache(len(lengths) * BLOCKS_A_ROW + 1, BLOCK_SIZE)
        before = [max(n - count, 1) for n, count in zip(lengths, queries, strict=True)]
        model.forward(ragged_batch(before, before, [False] * 5, model.device), cache)
        found.append(model.forward(ragged_batch(lengths, queries, decodes, model.device), cache).cpu())
    alive = (torch.tensor(lengths) > 0).repeat_interleave(torch.tensor(queries))
    assert relative_error(found[0][alive], found[1][alive]) < NEAR[HALF]


WATCHED = replace(config_of("Qwen3MoeForCausalLM"), hidden_size=128, head_dim=32)


def test_a_row_has_the_bits_that_it_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    with torch.inference_mode():
        watched = Watched(WATCHED, 23, 64)
        assert differing(watched, crowds((1, 2, 5), 64, (20,))) == []


@pytest.mark.large
def test_it_has_them_among_more_rows_than_one_program_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        multiply_as_matrix_units(monkeypatch)
    with torch.inference_mode():
        watched = Watched(WATCHED, 40, 64)
        assert differing(watched, crowds((8, 64, 96), 64, (50,))) == []
