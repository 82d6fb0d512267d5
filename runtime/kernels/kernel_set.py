"""The seam between a decoder and the kernels that run it: `reference` for the CPU, and Triton kernels for CUDA.

T is the number of query tokens of a forward. No method may wait for the device, and none may read a tensor's values on
the host, the reference apart, which runs where host and device are one.
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
    """Kernels bound to one model: a function for each kind of mixer and of feed-forward, called once a layer when the
    model is put together. What it returns does that layer's work on a *stream*: a batch's tokens under way, which the
    caller takes through every layer. May keep buffers: it serves one thread, and one stream at a time.

    What a kind computes stands at its dataclass. positions may be anything for masked rows, and what is computed for
    those reaches no other.
    """

    def attention(self, weights: Attention, place: int) -> Callable[[_Stream], None]:
        """place: of this mixer's keys and values in a `KVCache`.

        The work writes K and V of the batch's tokens to `slot_mapping` first. Attention of a row with seq_len 0 is
        zero, and nothing beyond a row's length reaches a result, whatever the cache holds there.
        """

    def mamba2(self, weights: Mamba2, place: int) -> Callable[[_Stream], None]:
        """place: of this mixer's tensors in `KVCache.states`.

        The work reads and writes the state slots of live rows, and the snapshots that they begin with or leave; nobody
        else's. A row whose first query token is at position 0 begins with zeros. With the reference kernels the state
        of a row is the same bits however its tokens are cut into launches.
        """

    def gated_delta(self, weights: GatedDelta, place: int) -> Callable[[_Stream], None]:
        """The same for a gated delta net."""

    def dense(self, weights: Dense) -> Callable[[_Stream], None]: ...

    def ungated(self, weights: Ungated) -> Callable[[_Stream], None]: ...

    def experts(self, weights: Experts) -> Callable[[_Stream], None]:
        """Routing and grouping belong to the work. On a device of its own they stay there, in launches of one shape:
        no count of them reaches the host. An expert that no token of a live row has chosen is not read."""

    def stream(self, batch: ForwardBatch, cache: KVCache) -> AbstractContextManager[_Stream]:
        """The batch's tokens, embedded. Every layer is bound before the first stream begins."""

    def end(self, stream: _Stream) -> torch.Tensor:
        """Hidden states after the final norm, [num_tokens, hidden]."""


class DraftKernels(BoundKernels[_Stream], Protocol[_Stream]):
    """What a draft head computes beside what any model does."""

    def keep(self, weights: Attention, place: int) -> Callable[[_Stream], None]:
        """As `attention`, but K and V of the batch's tokens are written, and nothing else is done."""

    def fuse(self, weights: Fuse) -> Callable[[_Stream, torch.Tensor], None]:
        """What stands at `Fuse`, of the embedded tokens and of h, float32 [num_tokens, any], which is handed over with
        the stream."""

    def residual(self, stream: _Stream) -> torch.Tensor:
        """What the layers have left so far, without a norm, float32 [num_tokens, hidden]."""


class KernelSet(Protocol):
    """Everything a decoder computes."""

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the KV cache for a model of this dtype."""

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A matrix [out, in] as `linear` likes it in memory: the same shape and values, any strides. Called at load."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: [n, in], any n. weight: [out, in], packed. bias: [out]. Returns x @ weight.T + bias, [n, out]."""

    def bound(self, logits: torch.Tensor, cap: float) -> None:
        """logits = cap * tanh(logits / cap), in place. logits: float32, contiguous, of any shape."""

    def logits_into(
        self, hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, places: torch.Tensor, cap: float = 0.0
    ) -> None:
        """The head's product, bounded as by `bound` if cap is above 0. hidden: [n, hidden], any n. weight: [vocab,
        hidden], packed. out: float32 [m, vocab]. places: int32 [n], the row of `out` to which each row goes. Where
        several go to one place, what is there afterwards is nobody's; other rows of `out` stay as they are."""

    def bind(self, emb: EmbeddingAndHead) -> BoundKernels[Any]:
        """Prepare for one model. Its layers follow, by the functions of what is returned."""


class DraftKernelSet(KernelSet, Protocol):
    """A `KernelSet` that knows draft heads."""

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The norm of each row. x: float32 [n, width], any n, contiguous. Returns float32 [n, width]."""

    def bind(self, emb: EmbeddingAndHead) -> DraftKernels[Any]: ...
