"""A draft head on a GPU: `runahead.runtime.models.drafters.draft_head` with Triton kernels, without waiting for the
host.

That module explains entries and their blocks. Hidden states have the model's dtype here, and an entry is the result of
its two products, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.layers import AttentionShape, EmbeddingAndHead, Layer, Linear
from runahead.runtime.kernels.triton.attention.rope_and_cache import rotate_and_write
from runahead.runtime.kernels.triton.drafting.head_inputs import Joining
from runahead.runtime.kernels.triton.forward.decode import RowStream
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
from runahead.runtime.kernels.triton.ops.norms import rms_norm
from runahead.runtime.kernels.triton.ops.put_rows import put_columns
from runahead.runtime.models.architecture import HeadWeights
from runahead.runtime.models.decoder import Decoder, ReadHidden, bound_feed_forward
from runahead.runtime.models.drafters.draft_head import HeadSizes
from runahead.runtime.models.memory import memory_of
from runahead.runtime.models.rope import rope_table


@dataclass(frozen=True, slots=True)
class GpuDraftCache:
    """A network's data of rows, in their blocks. hidden: [num_blocks * block_size, width], by KV slot, the hidden
    states that it reads; width is 0 if it reads none."""

    entries: KVCache
    hidden: torch.Tensor


class TritonHead(HeadSizes):
    """A draft head and its target: `runahead.runtime.models.drafters.draft_head.DraftHead` with enqueued work.

    positions: length of the table of rotary angles.
    """

    def __init__(self, weights: HeadWeights, target: Decoder, positions: int) -> None:
        self._layer = Layer(weights.mixer, weights.feed_forward)
        self._kernels = kernels = TritonKernelSet()
        of_target, self._mixer = target.weights, weights.mixer
        assert not self._mixer.norms_span_heads and self._mixer.post_norm is None, "no head is built so"
        self._embedding = of_target.whole_embedding if weights.embedding is None else weights.embedding
        self._rope = rope_table(weights.rope, positions, target.device)
        self._bound = kernels.bind(
            EmbeddingAndHead(self._embedding, weights.norm or of_target.final_norm, (self._rope,))
        )
        self._fuse, self._mix = self._bound.fuse(weights.fuse), self._bound.attention(self._mixer, 0)
        self._feed_forward = bound_feed_forward(self._bound, weights.feed_forward)
        self._entry = _of_keys(self._mixer.qkv, self._mixer.shape)
        self._targets = None if weights.targets is None else weights.targets.to(torch.int32)
        lm_head = of_target.whole_lm_head if weights.lm_head is None else weights.lm_head
        derived: tuple[torch.Tensor, ...] = ()
        if weights.lm_head is None and weights.targets is not None:
            lm_head = lm_head[weights.targets]
            derived = (lm_head,)
        super().__init__(weights, target, lm_head, derived)

    def make_cache(self, num_blocks: int, block_size: int) -> GpuDraftCache:
        """Return a zeroed cache; block 0 is the null block."""
        dtype, device = self._target.dtype, self._target.device
        entries = memory_of((self._layer,)).make_cache(num_blocks, block_size, dtype, device)
        slots = num_blocks * block_size
        return GpuDraftCache(entries, torch.zeros((slots, self.weights.width), dtype=dtype, device=device))

    def hidden_reader(self, tokens: int) -> tuple[ReadHidden | None, torch.Tensor | None]:
        """Return a callback for the target's forward over `tokens` query tokens, and the tensor that it fills for
        `fill`. None: the head reads the forward's result."""
        reads, width = self.weights.reads, self._target.config.hidden_size
        if not reads:
            return None, None
        device = self._target.device
        wide = torch.empty((tokens, len(reads) * width), dtype=self._target.dtype, device=device)

        def read_hidden(layers: int, stream: RowStream) -> None:
            for number, after in enumerate(reads):
                if layers == after:
                    stream.copy_residual(wide[:, number * width : (number + 1) * width])

        return read_hidden, wide

    def fill(self, batch: ForwardBatch, hidden: torch.Tensor, seen: torch.Tensor | None, cache: GpuDraftCache) -> None:
        """Store the data of F's query tokens and write their entries. batch: F's, by row or by query token. hidden: the
        target's after its last norm, [T, hidden]. seen: see `hidden_reader`."""
        mixer, product = self._mixer, self.weights.fuse.product
        x = self._joining(cache).in_batch(batch, self._read(hidden, seen))
        if not mixer.joined:
            assert product is not None, "no head attends to the hidden state as it is"
            x = self._kernels.linear(x, product.weight, product.bias)
            if mixer.norm is not None:
                x = rms_norm(x, mixer.norm.weight, mixer.norm.eps)
        entries = self._kernels.linear(x, self._entry.weight, self._entry.bias)
        rotate_and_write(
            entries, self._rope.cos, self._rope.sin, batch.positions, batch.slot_mapping, cache.entries.keys[0],
            cache.entries.values[0], 0, mixer.q_norm, mixer.k_norm,
        )  # fmt: skip

    def _read(self, hidden: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden states to keep, [T, width]."""
        narrow, norms = self.weights.narrow, self.weights.read_norms
        if narrow is None or seen is None:
            return hidden
        if norms:
            parts = zip(seen.chunk(len(norms), dim=1), norms, strict=True)
            seen = torch.cat([rms_norm(part, norm.weight, norm.eps) for part, norm in parts], dim=1)
        return self._kernels.linear(seen, narrow.weight, narrow.bias)

    def step(
        self, batch: ForwardBatch, before: torch.Tensor, is_first: bool, cache: GpuDraftCache, logits: torch.Tensor
    ) -> torch.Tensor:
        """Write the entries of one token of each row, and the next token's logits into `logits`, float32 [R, vocab of
        the target].

        before: in the first step int64 [R], KV slots of the previous hidden states; then the previous step's result,
        the hidden states that the head predicts for these tokens.
        """
        own, joining = self.weights, self._joining(cache)
        join = joining.of_places if is_first else joining.of_expected
        with self._bound.stream(batch, cache.entries) as stream:
            self._fuse(stream, lambda residual: join(batch, before, residual))
            self._mix(stream)
            self._feed_forward(stream)
            normed = None if own.norm is None else self._bound.end(stream)
            left = stream.left()
        self._write_logits(left if normed is None else normed, batch, logits)
        return normed if own.passes_normed and normed is not None else left

    def _write_logits(self, hidden: torch.Tensor, batch: ForwardBatch, logits: torch.Tensor) -> None:
        indexes = batch.query_start_loc[: batch.num_rows]  # each row has one query token
        if self._targets is None:
            self._kernels.logits_into(hidden, self._lm_head, logits, indexes, self._cap)
            return
        known = logits.new_empty((batch.num_rows, self._lm_head.shape[0]))
        self._kernels.logits_into(hidden, self._lm_head, known, indexes)
        put_columns(known, logits, self._targets)

    def _joining(self, cache: GpuDraftCache) -> Joining:
        return Joining(self.weights.fuse, self._embedding, cache.hidden, cache.entries.block_size)


def _of_keys(qkv: Linear, shape: AttentionShape) -> Linear:
    """Return the columns of the product that make keys and values, which come last."""
    return Linear(qkv.weight[shape.q_size :], None if qkv.bias is None else qkv.bias[shape.q_size :])
