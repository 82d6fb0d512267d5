"""Models whose matrices stay quantized, by Triton's kernels: close to the reference, and a row's bits are its own."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.quantized_weights import GROUPS, quantized
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = pytest.mark.usefixtures("fp8_matrix_units")

from runahead.runtime.kernels.layers import Attention, Dense, Layer, Linear  # noqa: E402
from runahead.runtime.kernels.reference.forward import ReferenceKernels  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.architecture import ModelWeights  # noqa: E402
from runahead.runtime.models.cpu_check.self_test import MASKED, Trial  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from runahead.runtime.models.weights import dummy_weights  # noqa: E402
from tests.gpu.gpu_chain import small_config  # noqa: E402

CONFIG = small_config(hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=64, num_layers=1)
LENGTH = 6  # tokens of the watched row before the launch that is looked at


def each_linear(weights: ModelWeights, change: Any) -> ModelWeights:
    """With other products in its layers."""

    def changed(part: Any) -> Any:
        if isinstance(part, Linear):
            return change(part)
        if isinstance(part, Layer | Attention | Dense):
            return replace(part, **{field.name: changed(getattr(part, field.name)) for field in fields(part)})
        return part

    return replace(weights, layers=tuple(map(changed, weights.layers)))


def drawn(group: int) -> ModelWeights:
    """Random weights with FP8 matrices in every layer, not yet as a GPU has them."""

    def of_form(linear: Linear) -> Linear:
        outputs, depth = linear.weight.shape
        weight = quantized(group, outputs, depth, DEVICE)
        return Linear(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), linear.bias, weight)

    plain = dummy_weights(CONFIG, torch.bfloat16, DEVICE, lambda weight: weight.contiguous())
    return each_linear(plain, of_form)


def in_blocks(weights: ModelWeights) -> ModelWeights:
    def packed(linear: Linear) -> Linear:
        assert linear.quantized is not None
        return replace(linear, quantized=linear.quantized.in_blocks())

    return each_linear(weights, packed)


def logits_among(model: Decoder, others: int, prompt: int = 0) -> torch.Tensor:
    """Of the watched row, behind tokens that it has alone, in a launch with others: rows that decode, every second one
    masked, and a prompt."""
    tokens = [[3 + 7 * row % 150 + place for place in range(LENGTH + 1)] for row in range(others + 1)]
    trial = Trial(model, [*tokens, list(range(20, 20 + max(prompt, 1)))], 32, 16, seed=others)
    trial.advance([(0, LENGTH)])
    for row in range(1, others + 1):
        trial.advance([(row, LENGTH)])
    work = [(MASKED if row % 2 else row, 1) for row in range(1, others + 1)]
    work.insert(others // 2, (0, 1))
    if prompt:
        work.append((others + 1, prompt))
    return trial.advance(work)[others // 2][0].float().cpu()


@pytest.mark.parametrize("group", GROUPS, ids=("channel", "blocks"))
def test_a_row_has_the_same_logits_alone_among_others_and_beside_prompts(group: int) -> None:
    model = Decoder(CONFIG, in_blocks(drawn(group)), TritonKernelSet(), 64)
    alone = logits_among(model, 0)
    assert alone.isfinite().all()
    for others, prompt in ((1, 0), (5, 0), (20, 0), (0, 9), (4, 17)):
        assert torch.equal(logits_among(model, others, prompt), alone), (others, prompt)


@pytest.mark.parametrize("group", GROUPS, ids=("channel", "blocks"))
def test_logits_are_close_to_the_reference_with_the_dequantized_weights(group: int) -> None:
    weights = drawn(group)
    found = logits_among(Decoder(CONFIG, in_blocks(weights), TritonKernelSet(), 64), 2)

    def dequantized(linear: Linear) -> Linear:
        assert linear.quantized is not None
        return Linear(linear.quantized.dequantized().cpu(), linear.bias)

    kernels = ReferenceKernels()
    plain = each_linear(weights, dequantized)
    plain = replace(plain, embedding=plain.embedding.cpu(), lm_head=kernels.pack_weight(plain.lm_head.cpu()))
    expected = logits_among(Decoder(CONFIG, _on_the_cpu(plain), kernels, 64), 2)
    assert (found - expected).norm() <= 0.05 * expected.norm()


def _on_the_cpu(weights: ModelWeights) -> ModelWeights:
    def moved(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.cpu()
        if isinstance(part, tuple):
            return tuple(map(moved, part))
        if hasattr(part, "__dataclass_fields__"):
            return replace(part, **{field.name: moved(getattr(part, field.name)) for field in fields(part)})
        return part

    moved_weights: ModelWeights = moved(weights)
    return moved_weights
