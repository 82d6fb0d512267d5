"""Models whose matrices stay quantized, by Triton's kernels: close to the reference, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Final

import pytest
import torch

from tests.runtime.kernels.quantized_weights import quantized
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "fp8_matrix_units"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

from runahead.runtime.kernels.layers import Attention, Dense, Experts, Layer, Linear  # noqa: E402
from runahead.runtime.kernels.quantized_weight import QuantizedWeight  # noqa: E402
from runahead.runtime.kernels.reference.forward import ReferenceKernels  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.architecture import ModelWeights  # noqa: E402
from runahead.runtime.models.blocks.dense import DenseConfig  # noqa: E402
from runahead.runtime.models.cpu_check.self_test import MASKED, Trial  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from runahead.runtime.models.weights import dummy_weights  # noqa: E402
from tests.gpu.gpu_chain import small_config  # noqa: E402
from tests.runtime.kernels.fp8_experts import dequantized as in_16_bits  # noqa: E402
from tests.runtime.kernels.fp8_experts import fp8_experts  # noqa: E402

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
}
CONFIG = small_config(**SIZES, num_layers=1, windows=(0,))
WITH_EXPERTS: Final[dict[str, Any]] = {
    "architecture": "Qwen3MoeForCausalLM",
    "experts": 4,
    "chosen": 2,
    "expert_size": 128,
    "renormalised": True,
}
EXPERTS = small_config(**SIZES, **WITH_EXPERTS, sparse=(True, True))
IDS = ("channel", "blocks", "experts")
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


def drawn(group: int, config: DenseConfig = CONFIG) -> ModelWeights:
    """Random weights with FP8 matrices in every layer, but for experts not yet as a GPU has them."""

    def of_form(linear: Linear) -> Linear:
        outputs, depth = linear.weight.shape
        weight = quantized(group, outputs, depth, DEVICE)
        return Linear(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), linear.bias, weight)

    plain = dummy_weights(config, torch.bfloat16, DEVICE, lambda weight: weight.contiguous())
    return with_experts(each_linear(plain, of_form), in_fp8)


def with_experts(weights: ModelWeights, change: Callable[[Experts], Experts]) -> ModelWeights:
    """With other experts in layers that have any."""

    def changed(layer: Layer) -> Layer:
        kind = layer.feed_forward
        return replace(layer, feed_forward=change(kind)) if isinstance(kind, Experts) else layer

    return replace(weights, layers=tuple(map(changed, weights.layers)))


def in_fp8(weights: Experts) -> Experts:
    """The same norm and router with random experts, as a GPU has them."""
    hidden, width = weights.down[0].weight.shape
    drawn = fp8_experts(hidden, width, (128, 128), DEVICE, count=weights.count)
    return replace(weights, gate_up=drawn.gate_up, down=drawn.down)


def for_gpu(weights: ModelWeights) -> ModelWeights:
    def packed(linear: Linear) -> Linear:
        assert isinstance(linear.quantized, QuantizedWeight)
        return replace(linear, quantized=linear.quantized.for_gpu())

    return each_linear(weights, packed)


def logits_among(model: Decoder, others: int, prompt: int = 0) -> torch.Tensor:
    """Of the watched row, behind tokens that it has alone, in a launch with others: rows that decode, every second one
    masked, and a prompt."""
    tokens = [[3 + 7 * row % 150 + place for place in range(LENGTH + 1)] for row in range(others + 1)]
    trial = Trial(model, [*tokens, list(range(20, 20 + max(prompt, 1)))], 32, 16, seed=others)
    trial.advance([(0, LENGTH)])
    if decoding := range(2, others + 1, 2):
        trial.advance([(row, LENGTH) for row in decoding])
    work = [(row if row in decoding else MASKED, 1) for row in range(1, others + 1)]
    work.insert(others // 2, (0, 1))
    if prompt:
        work.append((others + 1, prompt))
    return trial.advance(work)[others // 2][0].float().cpu()


@pytest.mark.parametrize(
    ("group", "config"),
    [
        (0, CONFIG),
        (128, CONFIG),
        (0, small_config(**SIZES, **WITH_EXPERTS, sparse=(True,), num_layers=1, windows=(0,))),
    ],
    ids=IDS,
)
def test_a_row_has_the_same_logits_alone_among_others_and_beside_prompts(group: int, config: DenseConfig) -> None:
    model = Decoder(config, for_gpu(drawn(group, config)), TritonKernelSet(), 64)
    alone = logits_among(model, 0)
    assert alone.isfinite().all()
    for others, prompt in ((1, 0), (5, 0), (20, 0), (0, 9), (4, 17)):
        assert torch.equal(logits_among(model, others, prompt), alone), (others, prompt)


@pytest.mark.parametrize(("group", "config"), [(0, CONFIG), (128, CONFIG), (0, EXPERTS)], ids=IDS)
def test_logits_are_close_to_the_reference_with_the_dequantized_weights(group: int, config: DenseConfig) -> None:
    weights = drawn(group, config)
    found = logits_among(Decoder(config, for_gpu(weights), TritonKernelSet(), 64), 2)

    def dequantized(linear: Linear) -> Linear:
        assert isinstance(linear.quantized, QuantizedWeight)
        return Linear(linear.quantized.dequantized().cpu(), linear.bias)

    kernels = ReferenceKernels()
    plain = with_experts(each_linear(weights, dequantized), in_16_bits)
    plain = replace(plain, embedding=plain.embedding.cpu(), lm_head=kernels.pack_weight(plain.lm_head.cpu()))
    expected = logits_among(Decoder(config, _on_the_cpu(plain), kernels, 64), 2)
    assert (found - expected).norm() <= (0.05 if config is CONFIG else 0.1) * expected.norm()


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
