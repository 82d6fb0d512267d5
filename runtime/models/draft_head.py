"""A draft head at work: more layers over the same rows and blocks as the model that it drafts for.

Entry t of a row, the keys and values at position t, is made of (hidden state of t - 1, token t): of tokens up to t
alone, so that whoever finds the model's block finds the head's. There is no entry 0. The model's hidden states lie in
the blocks too, so that entry t finds its own wherever the cut of a prompt, a cached prefix or the end of a run lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.kernel_set import DraftKernelSet
from runahead.runtime.kernels.layers import Ends, Layer
from runahead.runtime.models.architecture import HeadWeights
from runahead.runtime.models.decoder import Decoder, Look
from runahead.runtime.models.memory import memory_of
from runahead.runtime.models.rope import rope_table

_NOT_DRAFTED: Final = -1e30  # the logit of a token that a head does not know: finite, and never the highest


@dataclass(frozen=True, slots=True)
class HeadCache:
    """What a head keeps of rows, in their blocks. hidden: float32 [num_blocks * block_size, width], by KV slot, the
    hidden states that the head reads."""

    entries: KVCache
    hidden: NDArray[np.float32]


class DraftHead:
    """A head and its target on the CPU. positions: rotary angles are tabled for this many. Serves one thread."""

    def __init__(self, weights: HeadWeights, target: Decoder, kernels: DraftKernelSet, positions: int) -> None:
        self.weights = weights
        self._target = target
        self._kernels = kernels
        of_target = target.weights
        rope = rope_table(weights.rope, positions, target.device)
        embedding = of_target.embedding if weights.embedding is None else weights.embedding
        # float32 once, and not for each of both
        ends = Ends(embedding.float(), weights.norm or of_target.final_norm, (rope,))
        self._filling, self._drafting = kernels.bind(ends), kernels.bind(ends)
        self._fuse_to_fill, self._keep = self._filling.fuse(weights.fuse), self._filling.keep(weights.mixer, 0)
        self._fuse, self._mix = self._drafting.fuse(weights.fuse), self._drafting.attention(weights.mixer, 0)
        self._feed_forward = self._drafting.dense(weights.feed_forward)

    @property
    def step_share(self) -> float:
        """Of the weights that a launch of the target reads, those that `step` does: what it takes, about, where weights
        are most of it. A row of an embedding is next to nothing."""
        config, own = self._target.config, self.weights
        of_lm_head = config.vocab_size * config.hidden_size
        read = self._target.num_parameters - (0 if config.tie_word_embeddings else of_lm_head)
        step = own.parameters - (0 if own.embedding is None else own.embedding.numel())
        return (step + (of_lm_head if own.lm_head is None else 0)) / read

    def make_cache(self, num_blocks: int, block_size: int) -> HeadCache:
        """A zeroed cache; block 0 is the null block."""
        entries = memory_of((Layer(self.weights.mixer, self.weights.feed_forward),)).make_cache(
            num_blocks, block_size, torch.float32, self._target.device
        )  # fmt: skip
        return HeadCache(entries, np.zeros((num_blocks * block_size, self.weights.width), np.float32))

    def looking(self, seen: dict[int, torch.Tensor]) -> Look | None:
        """What the target's forward is to be told, for `read`: puts the hidden states that the head reads into `seen`,
        float32 [T, hidden], by the number of layers that they come after. None: it reads the last ones alone."""
        reads = self.weights.reads
        if not reads:
            return None

        def look(layers: int, stream: Any) -> None:
            if layers in reads:
                seen[layers] = self._filling.residual(stream)

        return look

    def read(self, hidden: torch.Tensor, seen: dict[int, torch.Tensor]) -> NDArray[np.float32]:
        """The hidden states that are kept, float32 [T, width]. hidden: the target's after its last norm. seen: see
        `looking`."""
        narrow = self.weights.narrow
        if narrow is None:
            return hidden.numpy()
        with np.errstate(all="ignore"):
            wide = torch.cat([seen[layers] for layers in self.weights.reads], dim=1)
            return self._kernels.linear(wide, narrow.weight, narrow.bias).numpy()

    def fill(self, batch: ForwardBatch, hidden: NDArray[np.float32], cache: HeadCache) -> None:
        """Writes the entries of the batch's tokens. hidden: float32 [T, width], of the positions before them."""
        with self._filling.stream(batch, cache.entries) as stream:
            self._fuse_to_fill(stream, torch.from_numpy(hidden))
            self._keep(stream)

    def step(
        self, batch: ForwardBatch, hidden: NDArray[np.float32], cache: HeadCache
    ) -> tuple[NDArray[np.float32], torch.Tensor]:
        """The same, and what follows: the hidden states that the head expects of the batch's tokens, float32 [T,
        width], and the logits of the tokens behind them, float32 [T, vocab]."""
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
        own = self.weights
        if own.lm_head is None:
            return self._target.logits(hidden)
        known = self._kernels.linear(hidden, own.lm_head)
        if own.targets is None:
            return known
        logits = torch.full((len(known), self._target.config.vocab_size), _NOT_DRAFTED)
        logits[:, own.targets] = known
        return logits
