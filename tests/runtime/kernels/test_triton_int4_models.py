"""Models whose matrices stay INT4, by Triton's kernels: in products of one segment, the dequantized model's bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.runtime.kernels.int4_weights import int4
from tests.runtime.kernels.test_triton_quantized_models import CONFIG, each_linear, logits_among
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = pytest.mark.usefixtures("fp8_matrix_units")  # sums of 16 columns, rounded to bfloat16 as a GPU does

from runahead.runtime.kernels.layers import Linear  # noqa: E402
from runahead.runtime.kernels.quantized_weight import QuantizedWeight  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.architecture import ModelWeights  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from runahead.runtime.models.weights import dummy_weights  # noqa: E402


def drawn(group: int, scales: torch.dtype) -> tuple[ModelWeights, ModelWeights]:
    """Random weights with INT4 matrices in every layer, as a GPU has them, and the same dequantized."""
    plain = dummy_weights(CONFIG, torch.bfloat16, DEVICE, lambda weight: weight.contiguous())

    def quantized(linear: Linear) -> Linear:
        outputs, depth = linear.weight.shape
        weight = int4(outputs, depth, DEVICE, group, scales, zero_points=True)
        return Linear(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), linear.bias, weight)

    def in_panels(linear: Linear) -> Linear:
        assert isinstance(linear.quantized, QuantizedWeight)
        return replace(linear, quantized=linear.quantized.panels())

    def dequantized(linear: Linear) -> Linear:
        assert isinstance(linear.quantized, QuantizedWeight)
        return Linear(linear.quantized.dequantized(), linear.bias)

    weights = each_linear(plain, quantized)
    return each_linear(weights, in_panels), each_linear(weights, dequantized)


@pytest.mark.parametrize(("group", "scales"), [(32, torch.float16), (128, torch.bfloat16)])
def test_a_row_has_the_logits_of_the_dequantized_model_alone_among_others_and_beside_prompts(
    group: int, scales: torch.dtype
) -> None:
    packed, plain = drawn(group, scales)
    model = Decoder(CONFIG, packed, TritonKernelSet(), 64)
    expected = logits_among(Decoder(CONFIG, plain, TritonKernelSet(), 64), 0)
    assert expected.isfinite().all()
    many = ((70, 0), (0, 70)) if DEVICE.type == "cuda" else ()  # the interpreter takes minutes
    for others, prompt in ((0, 0), (1, 0), (20, 0), (4, 17), *many):
        assert torch.equal(logits_among(model, others, prompt), expected), (others, prompt)
