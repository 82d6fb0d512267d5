"""The decoder: runs a model's layers with a kernel set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.kernel_set import BoundKernels, KernelSet
from runahead.runtime.kernels.layer_products import layers_to_warm_up
from runahead.runtime.kernels.layers import Attention, Dense, EmbeddingAndHead, FeedForward, Layer, Mamba2, Ungated
from runahead.runtime.kernels.ranks import ONE_RANK, Ranks
from runahead.runtime.models.architecture import ModelWeights
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.memory import FP8_KV, memory_of
from runahead.runtime.models.rope import rope_table

Work = Callable[[Any], None]  # on a stream of the kernels
ReadHidden = Callable[[int, Any], None]  # receives a stream of the kernels after this many layers


class Decoder:
    """A model's forward over a ragged batch and a paged cache. Kernels may keep buffers: a decoder serves one thread.

    weights: packed by the same kernels, the rank's part. positions: length of the rotary table; 0: the model's. ranks:
    of the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kernels: KernelSet,
        positions: int = 0,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.weights = weights
        self.kernels = kernels
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        longest = positions or config.max_position_embeddings
        ropes = tuple(rope_table(rope, longest, self.device) for rope in weights.ropes)
        self._kernels = kernels.bind(
            EmbeddingAndHead(weights.embedding, weights.final_norm, ropes, weights.embedding_scale, ranks)
        )
        indexes = count(), count()
        self._layers = tuple(_bound(self._kernels, layer, *indexes) for layer in weights.layers)
        self._to_warm_up = layers_to_warm_up(weights.layers)

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters, a tied matrix counted once."""
        return self.weights.parameters

    @property
    def logit_width(self) -> int:
        """The columns of `logits`."""
        return self.config.vocab_size if self.ranks.shard.is_first else 0

    def make_cache(
        self, num_blocks: int, block_size: int, state_slots: int = 0, snapshots: int = 0, drafts: int = 0
    ) -> KVCache:
        """Make a zeroed cache; block 0 is the null block. drafts: most of a row and launch."""
        mixers = [layer.mixer for layer in self.weights.layers]
        is_fp8 = any(isinstance(mixer, Attention) and mixer.kv_scales is not None for mixer in mixers)
        dtype = FP8_KV if is_fp8 else self.kernels.cache_dtype(self.dtype)
        memory, of_states = memory_of(self.weights.layers), (state_slots, snapshots, drafts)
        return memory.make_cache(num_blocks, block_size, dtype, self.device, *of_states)

    def forward(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        between: Callable[[], None] | None = None,
        read_hidden: ReadHidden | None = None,
        *,
        briefly: bool = False,
    ) -> torch.Tensor:
        """Write the K and V of the batch's tokens and the states of its rows. Returns hidden states after the final
        norm, [T, hidden].

        between: called after each layer is run, or on a GPU enqueued. read_hidden: called before the first layer and
        after each. briefly: for warm-up, stop when every kind of layer has run.
        """
        layers = self._layers[: self._to_warm_up] if briefly else self._layers
        with self._kernels.stream(batch, cache) as stream:
            for number, layer in enumerate(layers):
                if read_hidden is not None:
                    read_hidden(number, stream)
                for work in layer:
                    work(stream)
                if between is not None:
                    between()
            if read_hidden is not None:
                read_hidden(len(layers), stream)
            return self._kernels.end(stream)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits. hidden: [n, hidden], rows of what `forward` returned. Returns float32 [n, logit_width]: the
        whole vocabulary on the first rank, nothing on the others."""
        return self.ranks.gather(self.own_logits(hidden))

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of this rank's part of the vocabulary, float32 [n, vocab / ranks]."""
        logits = self.kernels.linear(hidden, self.weights.lm_head).float()
        if self.weights.logit_cap:
            self.kernels.bound(logits, self.weights.logit_cap)
        return logits


def _bound(
    kernels: BoundKernels[Any], layer: Layer, kv_indexes: Iterator[int], state_indexes: Iterator[int]
) -> tuple[Work, ...]:
    """Bind a layer's work in order. kv_indexes, state_indexes: iterators of cache indexes for keys and values, and for
    states.
    """
    mixer, feed_forward = layer.mixer, layer.feed_forward
    found: list[Work] = []
    if isinstance(mixer, Attention):
        found.append(kernels.attention(mixer, next(kv_indexes)))
    elif isinstance(mixer, Mamba2):
        found.append(kernels.mamba2(mixer, next(state_indexes)))
    elif mixer is not None:
        found.append(kernels.gated_delta(mixer, next(state_indexes)))
    if feed_forward is not None:
        found.append(bound_feed_forward(kernels, feed_forward))
    return tuple(found)


def bound_feed_forward(kernels: BoundKernels[Any], feed_forward: FeedForward) -> Work:
    """Bind a feed-forward of any kind."""
    if isinstance(feed_forward, Dense):
        return kernels.dense(feed_forward)
    if isinstance(feed_forward, Ungated):
        return kernels.ungated(feed_forward)
    return kernels.experts(feed_forward)
