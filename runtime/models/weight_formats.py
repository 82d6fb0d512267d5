"""How a checkpoint stores a model's tensors and how a device holds them: for clients, the log and sums of memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from runahead.runtime.checkpoint import Checkpoint, StoredTensor
from runahead.runtime.kernels.layer_products import kinds_that_stay
from runahead.runtime.kernels.ranks import Shard
from runahead.runtime.models.architecture import TensorStack
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.quantized_linears import Held, held_quantized
from runahead.runtime.models.registry import ARCHITECTURES
from runahead.runtime.models.weights import check_weights, described_stacks
from runahead.runtime.wire.messages import WeightFormat


def weight_formats(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: str = "cpu", quantize: str = "none",
    ranks: int = 1,
) -> tuple[WeightFormat, ...]:  # fmt: skip
    """Tensors that are stored and held alike together, the most numbers first. dtype: that is served. device: the type
    of it. quantize: as `load_weights` has it. ranks: among which the model is divided.

    Raises CheckpointError as `check_weights`.
    """
    passed_over = ARCHITECTURES[config.architecture].passed_over
    stored = check_weights(checkpoint, config)
    kinds = {
        name: held.kind
        for stack, held in _stacks(config, stored, dtype, device, quantize, ranks)
        for name in stack.names
        if held is not None
    }
    alike: dict[tuple[str, str], list[StoredTensor]] = defaultdict(list)
    for name, tensor in stored.items():
        if not passed_over(config, name):
            alike[tensor.dtype, kinds.get(name, str(dtype).removeprefix("torch."))].append(tensor)
    found = (
        WeightFormat(
            stored_as,
            held_as,
            len(tensors),
            sum(math.prod(tensor.shape) for tensor in tensors),
            sum(tensor.size_bytes for tensor in tensors),
        )
        for (stored_as, held_as), tensors in alike.items()
    )
    return tuple(sorted(found, key=lambda weights: -weights.parameters))


def held_bytes(
    checkpoint: Checkpoint | None, config: ModelConfig, dtype: torch.dtype, device: str, quantize: str = "none",
    ranks: int = 1,
) -> int:  # fmt: skip
    """Bytes that the rank's weights take on the device, computed before they are read. checkpoint: None: they are
    random. device: the type of it. quantize: as `load_weights` has it. ranks: among which the model is divided.

    Raises CheckpointError as `check_weights`.
    """
    stored = {} if checkpoint is None else check_weights(checkpoint, config)
    return sum(
        math.prod(stack.own_shape) * (stack.dtype or dtype).itemsize
        if held is None
        else held.size_bytes(*stack.own_shape)
        for stack, held in _stacks(config, stored, dtype, device, quantize, ranks)
    )


def some_stay_quantized(
    checkpoint: Checkpoint | None, config: ModelConfig, dtype: torch.dtype, device: str, quantize: str,
    ranks: int = 1,
) -> bool:  # fmt: skip
    """Whether the device holds matrices of the model quantized. Arguments: see `held_bytes`."""
    stored = {} if checkpoint is None else check_weights(checkpoint, config)
    return any(held is not None for _, held in _stacks(config, stored, dtype, device, quantize, ranks))


def _stacks(
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    device: str,
    quantize: str,
    ranks: int,
) -> Iterator[tuple[TensorStack, Held | None]]:
    """The stacks of tensors that a model is made of, and how each stays quantized. None: it does not."""
    model, stacks, offered = described_stacks(config, Shard(0, ranks))
    kinds = kinds_that_stay(model.layers, device)
    for stack in stacks:
        yield stack, held_quantized(stack, stored, dtype, device, kinds, quantize) if stack in offered else None
