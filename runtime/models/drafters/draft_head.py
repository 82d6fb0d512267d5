"""A draft head on the CPU: further layers over the same rows and blocks as its target model.

Entry t of a row, the keys and values at position t, depends on (hidden state of t - 1, token t), so on tokens up to t
only: finding the model's block finds the head's. There is no entry 0. The model's hidden states are stored in the
blocks too, so entry t finds its own across chunk boundaries, cached prefixes and ends of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.kernel_set import DraftKernelSet
from runahead.runtime.kernels.layer_products import idle_in
from runahead.runtime.kernels.layers import EmbeddingAndHead, Layer
from runahead.runtime.models.architecture import HeadWeights
from runahead.runtime.models.decoder import Decoder, ReadHidden, bound_feed_forward
from runahead.runtime.models.memory import memory_of, weight_bytes
from runahead.runtime.models.rope import rope_table


def unpacked(weight: torch.Tensor) -> torch.Tensor:
    """Return a packed matrix as an ordinary one."""
    return weight.to_dense() if weight.is_mkldnn else weight


_NOT_DRAFTED: Final = -1e30  # the logit of a token outside the head's vocabulary: finite, never the highest


@dataclass(frozen=True, slots=True)
class DraftCache:
    """A drafter's data of rows, in their blocks.

    hidden: float32 [num_blocks * block_size, width], by KV slot, the hidden states that it reads; width is 0 if it
    reads none.
    """

    entries: KVCache
    hidden: NDArray[np.float32]


class HeadSizes:
    """A head and its target on any device. lm_head: gives the logits. derived: tensors made of others."""

    def __init__(
        self, weights: HeadWeights, target: Decoder, lm_head: torch.Tensor, derived: Sequence[torch.Tensor]
    ) -> None:
        self.weights = weights
        self._target = target
        self._lm_head = lm_head
        self._derived = derived
        # Only the target's full logits are bounded, not a head's matrix or a part of the vocabulary.
        self._cap = target.weights.logit_cap if lm_head is target.weights.whole_lm_head else 0.0

    @property
    def parameters(self) -> int:
        """The head's trained parameters, without the target's."""
        return self.weights.parameters

    @property
    def step_fraction(self) -> float:
        """The weights that `step` reads, relative to a launch's of the target: its relative time if weights
        dominate. An embedding's row is negligible, and of experts a token reads the chosen ones.
        """
        own = self.weights
        step = own.parameters - (0 if own.embedding is None else own.embedding.numel())
        step -= idle_in((Layer(own.mixer, own.feed_forward),))
        if own.lm_head is None:
            step += self._lm_head.numel()
        return step / read_by_a_step(self._target)

    @property
    def weight_bytes(self) -> int:
        """The bytes of its tensors, including derived ones."""
        return weight_bytes(self.weights) + sum(tensor.numel() * tensor.itemsize for tensor in self._derived)


class DraftHead(HeadSizes):
    """A head and its target on the CPU: layers over the same rows and blocks as the target. Serves one thread.

    positions: length of the rotary table.
    """

    def __init__(self, weights: HeadWeights, target: Decoder, kernels: DraftKernelSet, positions: int) -> None:
        self._layer = Layer(weights.mixer, weights.feed_forward)
        self._kernels = kernels
        of_target = target.weights
        rope = rope_table(weights.rope, positions, target.device)
        embedding = of_target.whole_embedding if weights.embedding is None else weights.embedding
        # float32 once for both uses
        ends = EmbeddingAndHead(embedding.float(), weights.norm or of_target.final_norm, (rope,))
        self._filling, self._drafting = kernels.bind(ends), kernels.bind(ends)
        self._fuse_to_fill, self._keep = self._filling.fuse(weights.fuse), self._filling.keep(weights.mixer, 0)
        derived: list[torch.Tensor] = []
        lm_head = of_target.whole_lm_head if weights.lm_head is None else weights.lm_head
        if weights.lm_head is None and weights.targets is not None:
            lm_head = kernels.pack_weight(unpacked(lm_head)[weights.targets].contiguous())
            derived.append(lm_head)
        super().__init__(weights, target, lm_head, derived)
        self._targets = None if weights.targets is None else weights.targets.numpy()
        self._fuse, self._mix = self._drafting.fuse(weights.fuse), self._drafting.attention(weights.mixer, 0)
        self._feed_forward = bound_feed_forward(self._drafting, weights.feed_forward)

    def make_cache(self, num_blocks: int, block_size: int) -> DraftCache:
        """Make a zeroed cache; block 0 is the null block."""
        entries = memory_of((self._layer,)).make_cache(num_blocks, block_size, torch.float32, self._target.device)
        return DraftCache(entries, np.zeros((num_blocks * block_size, self.weights.width), np.float32))

    def hidden_reader(self, seen: dict[int, torch.Tensor]) -> ReadHidden | None:
        """Return a callback for the target's forward that stores hidden states for the head in `seen`, float32 [T,
        hidden], by the number of preceding layers. None: it reads none of these.
        """
        reads = self.weights.reads
        if not reads:
            return None

        def read_hidden(layers: int, stream: Any) -> None:
            if layers in reads:
                seen[layers] = self._filling.residual(stream)

        return read_hidden

    def read(self, hidden: torch.Tensor, seen: dict[int, torch.Tensor]) -> NDArray[np.float32]:
        """Return the hidden states to keep, float32 [T, width]. hidden: the target's after its last norm. seen: see
        `hidden_reader`.
        """
        narrow, norms = self.weights.narrow, self.weights.read_norms
        if narrow is None:
            return hidden.numpy()
        with np.errstate(all="ignore"):
            wide = torch.cat([seen[layers] for layers in self.weights.reads], dim=1)
            if norms:
                parts = zip(wide.chunk(len(norms), dim=1), norms, strict=True)
                wide = torch.cat([self._kernels.normed(part.contiguous(), norm) for part, norm in parts], dim=1)
            return self._kernels.linear(wide, narrow.weight, narrow.bias).numpy()

    def fill(self, batch: ForwardBatch, hidden: NDArray[np.float32], cache: DraftCache) -> None:
        """Write the entries of the batch's tokens. hidden: float32 [T, width], of the previous positions."""
        with self._filling.stream(batch, cache.entries) as stream:
            self._fuse_to_fill(stream, torch.from_numpy(hidden))
            self._keep(stream)

    def step(
        self, batch: ForwardBatch, hidden: NDArray[np.float32], cache: DraftCache
    ) -> tuple[NDArray[np.float32], torch.Tensor]:
        """Write the entries of the batch's tokens, and return the predicted hidden states, float32 [T, width], and the
        next tokens' logits, float32 [T, vocab] of the target.
        """
        own = self.weights
        with self._drafting.stream(batch, cache.entries) as stream:
            self._fuse(stream, torch.from_numpy(hidden))
            self._mix(stream)
            self._feed_forward(stream)
            left = self._drafting.residual(stream)
            normed = left if own.norm is None else self._drafting.end(stream)
        return (normed if own.passes_normed else left).numpy(), self._logits(normed)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [n, vocab], of the layer's output, [n, width]."""
        known = self._kernels.linear(hidden, self._lm_head)
        if self._cap:
            self._kernels.bound(known, self._cap)
        if self._targets is None:
            return known
        logits = np.full((len(known), self._target.config.vocab_size), _NOT_DRAFTED, np.float32)
        logits[:, self._targets] = known.numpy()
        return torch.from_numpy(logits)


def read_by_a_step(model: Decoder) -> int:
    """Return how many of its weights a step reads on each rank. An embedding's row is negligible, and of experts a
    token reads the chosen ones.
    """
    config = model.config
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return (model.num_parameters - embedding) // model.ranks.shard.of - idle_in(model.weights.layers)
