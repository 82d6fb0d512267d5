"""The kernel set of CUDA: Triton kernels, and the vendor's matrix products through torch for more than one row."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from runahead.cuda_graphs.enqueue_watch import unwatched
from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.kernel_set import AttentionShape, Layers, LayerWeights, RopeTable
from runahead.runtime.kernels.triton import activation, embedding, norms
from runahead.runtime.kernels.triton.chunk_attention import chunk_attention
from runahead.runtime.kernels.triton.decode_attention import decode_attention
from runahead.runtime.kernels.triton.gemv import gemv
from runahead.runtime.kernels.triton.rotary import rotate_and_write


class TritonAttention:
    """Attention of one forward: split over the context where every row has one query, tiled by queries otherwise."""

    def __init__(self, batch: ForwardBatch, cache: KVCache, shape: AttentionShape, rope: RopeTable) -> None:
        self._batch = batch
        self._cache = cache
        self._shape = shape
        self._rope = rope

    def attend(self, index: int, window: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
        """Normalise (where the layer does) and rotate Q and K, write K and V, then attend causally.

        index: of the layer. qkv: [T, (heads + 2 * kv_heads) * head_dim]. Returns [T, heads * head_dim]. Never waits for
        the device: lengths and tables are read there.
        """
        batch, shape = self._batch, self._shape
        keys, values = self._cache.keys[index], self._cache.values[index]
        q = rotate_and_write(
            qkv,
            self._rope.cos,
            self._rope.sin,
            batch.positions,
            batch.slot_mapping,
            keys,
            values,
            shape.heads,
            layer.q_norm,
            layer.k_norm,
            shape.norm_eps,
        )
        if batch.is_decode:
            out = decode_attention(
                q, keys, values, batch.block_tables, batch.seq_lens, shape.scale, window, batch.max_seq_len
            )
        else:
            longest = batch.num_tokens - batch.num_rows + 1
            out = chunk_attention(
                q,
                keys,
                values,
                batch.block_tables,
                batch.seq_lens,
                batch.query_start_loc,
                longest,
                shape.scale,
                window,
            )
        return out.view(qkv.shape[0], shape.q_size)


class TritonLayers:
    """`BoundLayers` of Triton kernels."""

    def __init__(self, model: Layers) -> None:
        self._model = model
        # The norm that follows each layer: the next layer's, and at last the final one.
        self._next_norms = (*(layer.input_norm for layer in model.layers[1:]), model.final_norm)

    def forward(self, batch: ForwardBatch, cache: KVCache, between: Callable[[], None] = unwatched) -> torch.Tensor:
        """As `BoundLayers.forward`. The sum of residual and product is made by the norm that follows."""
        model, eps = self._model, self._model.norm_eps
        attention = TritonAttention(batch, cache, model.shape, model.rope)
        residual = embedding.embed(batch.token_ids, model.embedding)
        x = norms.rms_norm(residual, model.layers[0].input_norm, eps)
        for index, (layer, window, next_norm) in enumerate(
            zip(model.layers, model.windows, self._next_norms, strict=True)
        ):
            qkv = _linear(x, layer.qkv, layer.qkv_bias)
            x = _linear(attention.attend(index, window, layer, qkv), layer.o, layer.o_bias)
            x = norms.add_rms_norm(x, residual, layer.post_norm, eps)
            x = activation.silu_mul(_linear(x, layer.gate_up, layer.gate_up_bias))
            x = _linear(x, layer.down, layer.down_bias)
            x = norms.add_rms_norm(x, residual, next_norm, eps)
            between()
        return x


class TritonKernelSet:
    """A `runahead.runtime.kernels.kernel_set.KernelSet` for CUDA tensors. float32 products are true float32, not
    tf32."""

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.contiguous()

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return _linear(x, weight, bias)

    def bind(self, layers: Layers) -> TritonLayers:
        return TritonLayers(layers)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gemv(x, weight, bias) if x.shape[0] == 1 else F.linear(x, weight, bias)
