"""The dense decoder: Llama, Qwen2, Qwen3 and Mistral differ in their configuration only."""

from __future__ import annotations

from dataclasses import replace

import torch

from runtime.forward_batch import ForwardBatch, KVCache
from runtime.kernels.kernel_set import AttentionLayer, AttentionShape, KernelSet
from runtime.models.config import ModelConfig
from runtime.models.rope import rope_table
from runtime.models.weights import ModelWeights


class Decoder:
    """A model's forward over a ragged batch and a paged cache. Holds no state between calls.

    weights: packed by the same kernels. positions: rotary angles are tabled for this many; 0 takes the model's own.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, kernels: KernelSet, positions: int = 0) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._shape = AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5, config.rms_norm_eps
        )
        self._layers = tuple(
            AttentionLayer(index, window, layer.q_norm, layer.k_norm)
            for index, (window, layer) in enumerate(zip(config.windows, weights.layers, strict=True))
        )
        # The norm that follows each layer: the next layer's, and at last the final one.
        self._next_norms = (*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm)
        self._rope = rope_table(config, positions or config.max_position_embeddings, self.device)
        self._zeros = torch.zeros(kernels.row_multiple, dtype=torch.int64, device=self.device)

    @property
    def num_parameters(self) -> int:
        """Trained numbers, a tied matrix counted once."""
        return self.weights.parameters

    def make_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """A zeroed cache; block 0 is the null block."""
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        dtype = self.kernels.cache_dtype(self.dtype)

        def make() -> tuple[torch.Tensor, ...]:
            return tuple(torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(self.config.num_layers))

        return KVCache(make(), make(), block_size)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Writes the K and V of the batch's tokens. Returns hidden states after the final norm, [T, hidden]."""
        kernels, eps = self.kernels, self.config.rms_norm_eps
        batch = self._pad(batch)
        attention = kernels.begin(batch, cache, self._shape, self._rope)
        residual = kernels.embed(batch.token_ids, self.weights.embedding)
        x = kernels.rms_norm(residual, self.weights.layers[0].input_norm, eps)
        for weights, layer, next_norm in zip(self.weights.layers, self._layers, self._next_norms, strict=True):
            qkv = kernels.linear(x, weights.qkv, weights.qkv_bias)
            x = kernels.linear(attention.attend(layer, qkv), weights.o, weights.o_bias)
            x, residual = kernels.add_rms_norm(x, residual, weights.post_norm, eps)
            x = kernels.silu_mul(kernels.linear(x, weights.gate_up, weights.gate_up_bias))
            x = kernels.linear(x, weights.down, weights.down_bias)
            x, residual = kernels.add_rms_norm(x, residual, next_norm, eps)
        return x[: batch.num_tokens]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden], rows of what `forward` returned. Returns float32 [n, vocab]."""
        return self.kernels.linear(hidden, self.weights.lm_head).float()

    def _pad(self, batch: ForwardBatch) -> ForwardBatch:
        """Tokens up to a multiple of what the kernels ask for: token 0 at position 0 into the null block."""
        missing = -batch.num_tokens % self.kernels.row_multiple
        if missing == 0:
            return batch
        padding = self._zeros[:missing]
        return replace(
            batch,
            token_ids=torch.cat((batch.token_ids, padding)),
            positions=torch.cat((batch.positions, padding)),
            slot_mapping=torch.cat((batch.slot_mapping, padding)),
        )
