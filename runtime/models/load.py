"""Loads a decoder from a checkpoint."""

from __future__ import annotations

from collections.abc import Collection

import torch

from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.kernels.kernel_set import KernelSet
from runahead.runtime.kernels.ranks import ONE_RANK, Ranks
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weights import Progress, dummy_weights, load_weights


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype | None,
    load_format: str,
    kernels: KernelSet,
    progress: Progress | None = None,
    positions: int = 0,
    config: ModelConfig | None = None,
    ranks: Ranks = ONE_RANK,
    quantize: str = "none",
    kv_dtype: str = "auto",
    shared: Collection[str] = (),
) -> Decoder:
    """Load the checkpoint's decoder, with its configuration at `Decoder.config`.

    dtype: None: the checkpoint's. load_format: auto reads the weights, dummy draws random ones and needs only the
    configuration. progress: called with bytes done and in all. positions: the longest context; 0: the model's. config:
    the checkpoint's, if already read. quantize, kv_dtype, shared: see `load_weights`. Raises CheckpointError.
    """
    config = load_config(checkpoint) if config is None else config
    dtype = config.dtype if dtype is None else dtype
    if load_format == "dummy":
        weights = dummy_weights(
            config, dtype, device, kernels.pack_weight, shard=ranks.shard, quantize=quantize, kv_dtype=kv_dtype,
            shared=shared,
        )  # fmt: skip
    else:
        weights = load_weights(
            checkpoint, config, dtype, device, kernels.pack_weight, progress, ranks.shard, quantize, kv_dtype, shared
        )
    return Decoder(config, weights, kernels, positions, ranks)
