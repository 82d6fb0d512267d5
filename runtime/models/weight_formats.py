"""How a checkpoint stores the tensors of a model, for clients and for the log."""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from runahead.runtime.checkpoint import Checkpoint, StoredTensor
from runahead.runtime.models.config import ModelConfig
from runahead.runtime.models.registry import ARCHITECTURES
from runahead.runtime.models.weights import check_weights
from runahead.runtime.wire.messages import WeightFormat


def weight_formats(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> tuple[WeightFormat, ...]:
    """Tensors that are stored alike together, the most numbers first. dtype: in which the device holds them. Raises
    CheckpointError as `check_weights`."""
    passed_over = ARCHITECTURES[config.architecture].passed_over
    alike: dict[str, list[StoredTensor]] = defaultdict(list)
    for name, tensor in check_weights(checkpoint, config).items():
        if not passed_over(config, name):
            alike[tensor.dtype].append(tensor)
    held = str(dtype).removeprefix("torch.")
    found = (
        WeightFormat(
            stored_as,
            held,
            len(tensors),
            sum(math.prod(tensor.shape) for tensor in tensors),
            sum(tensor.size_bytes for tensor in tensors),
        )
        for stored_as, tensors in alike.items()
    )
    return tuple(sorted(found, key=lambda weights: -weights.parameters))
