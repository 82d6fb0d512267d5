"""The interface between a decoder and its kernels: `reference` for the CPU, Triton for CUDA.

T is the number of query tokens of a forward. No method may wait for the device or read tensor values on the host,
except in the reference, where host and device are one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import (
    Attention,
    Dense,
    EmbeddingAndHead,
    Experts,
    Fuse,
    GatedDelta,
    Mamba2,
    Norm,
    Ungated,
)

_Stream = TypeVar("_Stream")


class BoundKernels(Protocol[_Stream]):
    """Kernels bound to one model: a function for each kind of mixer and feed-forward, called once a layer when the
    model is assembled. It returns the layer's work on a *stream*, a batch's tokens that pass through every layer. May
    keep buffers: serves one thread and one stream at a time.

    Each kind's dataclass defines its computation. positions of masked rows may be anything, and their results reach no
    other row.
    """

    def attention(self, weights: Attention, cache_index: int) -> Callable[[_Stream], None]:
        """Bind an attention. cache_index: of its keys and values in a `KVCache`.

        The work first writes K and V of the batch's tokens to `slot_mapping`. Attention of a row with seq_len 0 is
        zero, and nothing beyond a row's length affects a result, whatever the cache holds.
        """

    def mamba2(self, weights: Mamba2, cache_index: int) -> Callable[[_Stream], None]:
        """Bind a Mamba-2 mixer. cache_index: of its tensors in `KVCache.states`.

        The work accesses only the state slots of live rows and their snapshots. A row whose first query token is at
        position 0 begins with zeros. With the reference kernels a row's state has the same bits for any split into
        launches.
        """

    def gated_delta(self, weights: GatedDelta, cache_index: int) -> Callable[[_Stream], None]:
        """Bind a gated delta net, as above."""

    def dense(self, weights: Dense) -> Callable[[_Stream], None]: ...

    def ungated(self, weights: Ungated) -> Callable[[_Stream], None]: ...

    def experts(self, weights: Experts) -> Callable[[_Stream], None]:
        """Bind experts. The work includes routing and grouping. On a separate device these stay there with fixed
        shapes: no counts reach the host. Experts that no live row's token chose are not read.
        """

    def stream(self, batch: ForwardBatch, cache: KVCache) -> AbstractContextManager[_Stream]:
        """Return the batch's embedded tokens. Every layer is bound before the first stream begins."""

    def end(self, stream: _Stream) -> torch.Tensor:
        """Return hidden states after the final norm, [num_tokens, hidden]."""


class DraftKernels(BoundKernels[_Stream], Protocol[_Stream]):
    """Further functions for draft heads."""

    def keep(self, weights: Attention, cache_index: int) -> Callable[[_Stream], None]:
        """Bind the cache write of an attention: K and V of the batch's tokens, and nothing else."""

    def fuse(self, weights: Fuse) -> Callable[[_Stream, torch.Tensor], None]:
        """Bind `Fuse` of the embedded tokens and h, float32 [num_tokens, any], an argument beside the stream."""

    def residual(self, stream: _Stream) -> torch.Tensor:
        """Return the residual without a norm, float32 [num_tokens, hidden]."""


class KernelSet(Protocol):
    """All computations of a decoder."""

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the KV cache for a model of this dtype."""

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a matrix [out, in] in the memory format for `linear`, which alone may read it: any strides, or opaque.
        Called at load.
        """

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute x @ weight.T + bias, [n, out]. x: [n, in], any n. weight: [out, in], packed. bias: [out]."""

    def bound(self, logits: torch.Tensor, cap: float) -> None:
        """Compute logits = cap * tanh(logits / cap) in place. logits: float32, contiguous, any shape."""

    def logits_into(
        self, hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, targets: torch.Tensor, cap: float = 0.0
    ) -> None:
        """Compute the head's product, with `bound` if cap is above 0. hidden: [n, hidden], any n. weight: [vocab,
        hidden], packed. out: float32 [m, vocab]. targets: int32 [n], each row's row in `out`; the content of a
        duplicate destination is undefined, other rows stay.
        """

    def bind(self, emb: EmbeddingAndHead) -> BoundKernels[Any]:
        """Prepare for one model, whose layers are bound next."""


class DraftKernelSet(KernelSet, Protocol):
    """A `KernelSet` with draft heads."""

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalize each row. x: float32 [n, width], any n, contiguous. Returns float32 [n, width]."""

    def bind(self, emb: EmbeddingAndHead) -> DraftKernels[Any]: ...
