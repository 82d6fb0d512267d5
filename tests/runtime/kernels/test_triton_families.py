"""What a family of models has of its own, in launches of every kind by the Triton kernels, against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import relative_error, triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.reference.forward import ReferenceKernels  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.blocks.dense import DenseConfig  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from runahead.runtime.models.registry import ARCHITECTURES  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402
from tests.runtime.kernels.test_triton_decode_streams import (  # noqa: E402
    BLOCK_SIZE,
    BLOCKS_A_ROW,
    ERROR,
    HALF,
    batch_of,
    decoder,
    ragged_batch,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "GraniteForCausalLM": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "logits_scaling": 3.0,
    },
    "SmolLM3ForCausalLM": {"rotates": (False, True)},
    "Olmo2ForCausalLM": {"attention_bias": True},
    "Phi3ForCausalLM": {"rotated": 12},
    # Scores and logits of random weights are so small that a tanh of the published sizes would not bend them.
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 20.0, "score_cap": 0.5, "logit_cap": 1.5},
    "Gemma3ForCausalLM": {"sliding_theta": 500.0, "query_pre_attn_scalar": 20.0},
}
# Architectures that tests of another file run by the Triton kernels.
ELSEWHERE = {
    "LlamaForCausalLM": "test_triton_decode_streams.py",
    "Qwen3ForCausalLM": "test_triton_decode_streams.py",
    "MixtralForCausalLM": "test_triton_experts.py",
    "Qwen3MoeForCausalLM": "test_triton_experts.py",
    "Glm4MoeForCausalLM": "test_triton_experts.py",
    "BambaForCausalLM": "test_triton_hybrids.py",
    "GraniteMoeHybridForCausalLM": "test_triton_hybrids.py",
    "Qwen3NextForCausalLM": "test_triton_hybrids.py",
    "NemotronHForCausalLM": "test_triton_hybrids.py",
}
# Architectures with the same layers as one of the above.
SAME_LAYERS = {
    "Qwen2ForCausalLM": "LlamaForCausalLM",  # with biases
    "MiMoForCausalLM": "LlamaForCausalLM",
    "MistralForCausalLM": "LlamaForCausalLM",
    "MinistralForCausalLM": "LlamaForCausalLM",
    "Qwen3_5ForCausalLM": "Qwen3NextForCausalLM",
    "Qwen3_5MoeForCausalLM": "Qwen3NextForCausalLM",
}
LENGTHS = (31, 0, 20)


def config_of(architecture: str) -> DenseConfig:
    return gpu_chain.small_config(
        architecture=architecture, windows=(0, 24), intermediate_size=128, **FAMILIES[architecture]
    )


def pair(architecture: str, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """The same model by the Triton kernels and by the reference."""
    torch.manual_seed(4)
    config = config_of(architecture)
    return decoder(config, TritonKernelSet(), dtype), decoder(config, ReferenceKernels(), torch.float32)


# Two families differ in their tables of angles and in nothing else: one of them goes everywhere.
EVERYWHERE = [
    pytest.param(name, marks=pytest.mark.large) if name == "Phi3ForCausalLM" else pytest.param(name)
    for name in FAMILIES
]


def test_every_architecture_or_one_with_its_layers_is_tried() -> None:
    """A new architecture has a line in `FAMILIES`, `ELSEWHERE` or `SAME_LAYERS`."""
    assert sorted([*FAMILIES, *ELSEWHERE, *SAME_LAYERS]) == sorted(ARCHITECTURES)
    assert set(SAME_LAYERS.values()) <= {*FAMILIES, *ELSEWHERE}
    folder = Path(__file__).parent
    assert [name for name, file in ELSEWHERE.items() if f'"{name}"' not in (folder / file).read_text("utf-8")] == []


# Every family has a lone row; these two, which differ most from others, have other dtypes, too. The rest is large.
IN_EVERY_DTYPE = ("GraniteForCausalLM", "Gemma2ForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "rows", "dtype"),
    [
        pytest.param(
            name,
            rows,
            dtype,
            marks=() if name in IN_EVERY_DTYPE or (rows == 1 and name != "Phi3ForCausalLM") else pytest.mark.large,
        )
        for name in FAMILIES
        for rows, dtype in ((1, HALF), (3, torch.float32), (2, torch.float16))
    ],
)
def test_decode_launches_of_one_row_and_in_other_dtypes(architecture: str, rows: int, dtype: torch.dtype) -> None:
    chunks_and_decode_launches(architecture, rows, dtype)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_decode_launches_of_few_rows(architecture: str) -> None:
    chunks_and_decode_launches(architecture, 3, HALF)


def chunks_and_decode_launches(architecture: str, rows: int, dtype: torch.dtype) -> None:
    """A decode launch after one of chunks, and chunks again."""
    lengths, found = list(LENGTHS[:rows]), []
    for model in pair(architecture, dtype):
        cache = model.make_cache(rows * BLOCKS_A_ROW + 1, BLOCK_SIZE)
        model.forward(batch_of([max(n - 1, 0) for n in lengths], 16, model.device), cache)
        logits = [model.logits(model.forward(batch_of(lengths, 1, model.device), cache))]
        after = batch_of([n + 16 if n else 0 for n in lengths], 16, model.device)
        logits.append(model.logits(model.forward(after, cache)).view(rows, 16, -1)[:, -1])
        found.append(torch.stack(logits).cpu())
    alive = torch.tensor(lengths) > 0
    for launch in range(2):
        assert relative_error(found[0][launch][alive], found[1][launch][alive]) < ERROR[dtype]


@pytest.mark.parametrize("architecture", EVERYWHERE)
def test_launches_of_decode_rows_and_chunks(architecture: str) -> None:
    found, queries = [], [1, 9, 1]
    for model in pair(architecture, HALF):
        cache = model.make_cache(3 * BLOCKS_A_ROW + 1, BLOCK_SIZE)
        before = [max(n - count, 1) for n, count in zip(LENGTHS, queries, strict=True)]
        model.forward(ragged_batch(before, before, [False] * 3, model.device), cache)
        found.append(model.forward(ragged_batch(list(LENGTHS), queries, [True, False, True], model.device), cache))
    alive = (torch.tensor(LENGTHS) > 0).repeat_interleave(torch.tensor(queries))
    assert relative_error(found[0].cpu()[alive], found[1][alive]) < ERROR[HALF]
