"""From a checkpoint to a decoder."""

from __future__ import annotations

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
) -> Decoder:
    """The checkpoint's decoder, its configuration at `Decoder.config`.

    dtype: None takes the checkpoint's own. load_format: auto reads the weights, dummy draws random ones of the
    configured shape and needs the configuration only. progress: called with bytes done and bytes in all. positions: the
    longest context that will be asked for; 0 takes the model's own. config: the checkpoint's, where the caller has read
    it before; None reads it. quantize, kv_dtype: as `load_weights` has them. Raises CheckpointError.
    """
    config = load_config(checkpoint) if config is None else config
    dtype = config.dtype if dtype is None else dtype
    if load_format == "dummy":
        weights = dummy_weights(
            config, dtype, device, kernels.pack_weight, share=ranks.share, quantize=quantize, kv_dtype=kv_dtype
        )
    else:
        weights = load_weights(
            checkpoint, config, dtype, device, kernels.pack_weight, progress, ranks.share, quantize, kv_dtype
        )
    return Decoder(config, weights, kernels, positions, ranks)
