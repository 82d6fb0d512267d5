"""A draft head at work: more layers over the same rows and blocks as the model that it drafts for.

Entry t of a row, the keys and values at position t, is made of (hidden state of t - 1, token t): of tokens up to t
alone, so that whoever finds the model's block finds the head's. There is no entry 0. The model's hidden states lie in
the blocks too, so that entry t finds its own wherever the cut of a prompt, a cached prefix or the end of a run lies.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.kernel_set import DraftKernelSet
from runahead.runtime.kernels.layer_products import idle_in
from runahead.runtime.kernels.layers import Ends, Layer
from runahead.runtime.models.architecture import HeadWeights
from runahead.runtime.models.decoder import Decoder, Look, bound_feed_forward
from runahead.runtime.models.drafters.draft_network import DraftCache
from runahead.runtime.models.drafters.head_entries import HeadEntries, unpacked
from runahead.runtime.models.memory import memory_of, weight_bytes
from runahead.runtime.models.rope import rope_table

_NOT_DRAFTED: Final = -1e30  # the logit of a token that a head does not know: finite, and never the highest


class DraftHead:
    """A head and its target on the CPU: a `runahead.runtime.models.drafters.draft_network.DraftNetwork`. positions:
    rotary angles are tabled for this many."""

    def __init__(self, weights: HeadWeights, target: Decoder, kernels: DraftKernelSet, positions: int) -> None:
        self.weights = weights
        self._layer = Layer(weights.mixer, weights.feed_forward)
        self._target = target
        self._kernels = kernels
        of_target = target.weights
        rope = rope_table(weights.rope, positions, target.device)
        embedding = of_target.embedding if weights.embedding is None else weights.embedding
        # float32 once, and not for each of both
        ends = Ends(embedding.float(), weights.norm or of_target.final_norm, (rope,))
        self._filling, self._drafting = kernels.bind(ends), kernels.bind(ends)
        self._fuse_to_fill, self._keep = self._filling.fuse(weights.fuse), self._filling.keep(weights.mixer, 0)
        self._entries = HeadEntries.of(weights, ends.embedding, rope, kernels)
        self._lm_head = weights.lm_head
        if weights.lm_head is None and weights.targets is not None:
            self._lm_head = kernels.pack_weight(unpacked(of_target.lm_head)[weights.targets].contiguous())
        self._targets = None if weights.targets is None else weights.targets.numpy()
        self._fuse, self._mix = self._drafting.fuse(weights.fuse), self._drafting.attention(weights.mixer, 0)
        self._feed_forward = bound_feed_forward(self._drafting, weights.feed_forward)

    @property
    def parameters(self) -> int:
        return self.weights.parameters

    @property
    def step_share(self) -> float:
        return step_share(self.weights, self._target, self._lm_head)

    @property
    def weight_bytes(self) -> int:
        own = [] if self._entries is None else [self._entries.product.weight]
        if self.weights.lm_head is None and self._lm_head is not None:
            own.append(self._lm_head)
        return weight_bytes(self.weights) + sum(tensor.numel() * tensor.itemsize for tensor in own)

    def make_cache(self, num_blocks: int, block_size: int) -> DraftCache:
        entries = memory_of((self._layer,)).make_cache(num_blocks, block_size, torch.float32, self._target.device)
        return DraftCache(entries, np.zeros((num_blocks * block_size, self.weights.width), np.float32))

    def looking(self, seen: dict[int, torch.Tensor]) -> Look | None:
        reads = self.weights.reads
        if not reads:
            return None

        def look(layers: int, stream: Any) -> None:
            if layers in reads:
                seen[layers] = self._filling.residual(stream)

        return look

    def read(self, hidden: torch.Tensor, seen: dict[int, torch.Tensor]) -> NDArray[np.float32]:
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
        if self._entries is not None:
            self._entries.write(batch, hidden, cache.entries)
            return
        with self._filling.stream(batch, cache.entries) as stream:
            self._fuse_to_fill(stream, torch.from_numpy(hidden))
            self._keep(stream)

    def step(
        self, batch: ForwardBatch, hidden: NDArray[np.float32], cache: DraftCache
    ) -> tuple[NDArray[np.float32], torch.Tensor]:
        own = self.weights
        with self._drafting.stream(batch, cache.entries) as stream:
            self._fuse(stream, torch.from_numpy(hidden))
            self._mix(stream)
            self._feed_forward(stream)
            left = self._drafting.residual(stream)
            normed = left if own.norm is None else self._drafting.end(stream)
        return (normed if own.passes_normed else left).numpy(), self._logits(normed)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab], of what the head leaves, [n, width]."""
        if self._lm_head is None:
            return self._target.logits(hidden)
        known = self._kernels.linear(hidden, self._lm_head)
        if self._targets is None:
            return known
        logits = np.full((len(known), self._target.config.vocab_size), _NOT_DRAFTED, np.float32)
        logits[:, self._targets] = known.numpy()
        return torch.from_numpy(logits)


def step_share(own: HeadWeights, target: Decoder, lm_head: torch.Tensor | None) -> float:
    """See `DraftNetwork.step_share`. A row of an embedding is next to nothing, and of experts a token reads those that
    it chooses. lm_head: what makes the head's logits; None: the target's own."""
    config, layer = target.config, Layer(own.mixer, own.feed_forward)
    of_lm_head = config.vocab_size * config.hidden_size
    read = target.num_parameters - (0 if config.tie_word_embeddings else of_lm_head)
    read -= idle_in(target.weights.layers)
    step = own.parameters - (0 if own.embedding is None else own.embedding.numel())
    step -= idle_in((layer,))
    if own.lm_head is None:
        step += of_lm_head if lm_head is None else lm_head.numel()
    return step / read
