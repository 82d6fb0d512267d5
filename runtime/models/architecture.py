"""The interface of an architecture's file: reading `config.json`, tensor names and layers."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final, Generic, TypeVar

import torch

from runahead.runtime.checkpoint import StoredTensor
from runahead.runtime.kernels.layers import Attention, FeedForward, Fuse, Layer, Linear, Norm
from runahead.runtime.kernels.quantized_weight import QuantizedWeight
from runahead.runtime.kernels.ranks import WHOLE, Shard
from runahead.runtime.models.config.keys import Unread
from runahead.runtime.models.config.model_config import BY_LAYER, ModelConfig, with_layers
from runahead.runtime.models.rope import Rope

ConfigT = TypeVar("ConfigT", bound=ModelConfig)  # an architecture's
# Older checkpoints store buffers that a decoder computes.
_ROTARY_CACHE: Final = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
KvScales = Callable[[str, int], torch.Tensor]
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def computed(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Compute float32 numbers from a tensor, element by element. change: takes and returns float32. A description
    (device `meta`) only changes its dtype: for arithmetic there, torch loads its compiler, 2 s of CPU time.
    """
    wide = tensor.float()
    return wide if wide.is_meta else change(wide)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join tensors of one dtype by rows, [n, ...]; descriptions as `computed` says."""
    if parts[0].is_meta:
        return parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]))
    return torch.cat([*parts])


def in_order(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return rows of a tensor, [n, ...]. order: int64 [n]. Descriptions as `computed` says."""
    if tensor.is_meta:
        return tensor.new_empty((len(order), *tensor.shape[1:]))
    return tensor[order.to(tensor.device)]


@dataclass(frozen=True, slots=True)
class TensorStack:
    """Checkpoint tensors that are stacked by rows into one. rows: of each. dtype: of the stack; None: the model's. own:
    the rank's rows, ascending; None: all. inputs: the rank's columns; None: all. moved: rows of the
    rank's part, in the order of the product; None: ascending. experts: how many experts' matrices of one size they are;
    0: they are one matrix or a vector.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...] = ()  # (in,) for a matrix, () for a vector
    dtype: torch.dtype | None = None
    own: tuple[range, ...] | None = None
    inputs: range | None = None
    moved: tuple[range, ...] | None = None
    experts: int = 0

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of one whole tensor."""
        return (self.rows[index], *self.columns)

    @property
    def own_rows(self) -> tuple[range, ...]:
        return (range(sum(self.rows)),) if self.own is None else self.own

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Return the shape of the rank's part of the stack."""
        columns = self.columns if self.inputs is None else (len(self.inputs),)
        return (sum(map(len, self.own_rows)), *columns)

    def pieces(self) -> Iterator[tuple[str, range]]:
        """Yield the tensors of the rank's part in order, each with the rows to read."""
        begins = list(accumulate(self.rows, initial=0))
        for own in self.own_rows:
            for number in range(bisect_right(begins, own.start) - 1, bisect_left(begins, own.stop)):
                begin, end = begins[number], begins[number + 1]
                yield self.names[number], range(max(own.start, begin) - begin, min(own.stop, end) - begin)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of the whole stack."""
        if self.own is not None:
            whole = torch.cat([whole[own.start : own.stop] for own in self.own])
        return whole if self.inputs is None else whole[:, self.inputs.start : self.inputs.stop].contiguous()


def _ranges(numbers: torch.Tensor) -> tuple[range, ...]:
    """Return runs of consecutive numbers. numbers: int64 [n]."""
    ends = ((numbers.diff() != 1).nonzero().flatten() + 1).tolist()
    return tuple(
        range(int(numbers[begin]), int(numbers[end - 1]) + 1) for begin, end in pairwise([0, *ends, numbers.numel()])
    )


class TensorReader:
    """Gives an architecture the tensors that it names, in order.

    fill: makes the rank's part of a stack: read, random, or without memory in a description. pack: see
    `KernelSet.pack_weight`. shard: the rank's part of the model. quantized: makes the rank's part of a stack that stays
    quantized, None for others. kv_scales: reads the scales of FP8 keys and values, float32 [2, kv_heads], by the prefix
    of an attention's tensors and its KV heads; None: without FP8. shared: EMBEDDING and LM_HEAD, where a draft head
    reads them. parameters: numbers in the tensors given so far, each counted whole.
    """

    def __init__(
        self,
        fill: Callable[[TensorStack], torch.Tensor],
        pack: Callable[[torch.Tensor], torch.Tensor],
        shard: Shard = WHOLE,
        quantized: Callable[[TensorStack], QuantizedWeight | None] = lambda stack: None,
        kv_scales: KvScales | None = None,
        shared: Collection[str] = (),
    ):
        self._fill = fill
        self.pack = pack
        self.shard = shard
        self._quantized = quantized
        self._kv_scales = kv_scales
        self._shared = shared
        self.parameters = 0

    def renamed(self, rename: Callable[[str], str]) -> TensorReader:
        """Return a reader for tensors with other names in the checkpoint. rename: maps these names to the
        checkpoint's.
        """

        def theirs(stack: TensorStack) -> TensorStack:
            return replace(stack, names=tuple(map(rename, stack.names)))

        scales = self._kv_scales
        return TensorReader(
            lambda stack: self._fill(theirs(stack)),
            self.pack,
            self.shard,
            lambda stack: self._quantized(theirs(stack)),
            None if scales is None else lambda prefix, kv_heads: scales(rename(prefix), kv_heads),
            self._shared,
        )

    def tensor(
        self,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        *columns: int,
        dtype: torch.dtype | None = None,
        own: torch.Tensor | None = None,
        inputs: range | None = None,
    ) -> torch.Tensor:
        """Return the tensors of these names, stacked. rows: of each. dtype: None: the model's. own: int64, rows of the
        stack to return in this order, each at most once; None: all. inputs: columns to return; None: all.
        """
        stack, order = self._stack(TensorStack(names, rows, columns, dtype, None, inputs), own)
        part = self._fill(stack)
        return part if order is None else in_order(part, order)

    def of_tokens(self, name: str, vocab: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rank's rows of a matrix with one for each token, and what a draft head reads: the whole matrix, of
        which the rows are a part, if it is shared, else the rows. Raises ShardError.
        """
        own = self.shard.part_of(vocab, "tokens of the vocabulary")
        if name in self._shared:
            whole = self.tensor((name,), (vocab,), columns)
            return whole[own.start : own.stop], whole
        rows = self.tensor((name,), (vocab,), columns, own=torch.arange(own.start, own.stop))
        return rows, rows

    def _stack(self, stack: TensorStack, own: torch.Tensor | None) -> tuple[TensorStack, torch.Tensor | None]:
        """Return the stack with these rows, ascending, and the order to return them in, None if that is the same."""
        self.parameters += sum(stack.rows) * math.prod(stack.columns)
        if own is None:
            return stack, None
        ascending, order = own, None
        if not bool((own.diff() > 0).all()):
            ascending = own.sort().values
            order = torch.searchsorted(ascending, own)
        ranges = _ranges(ascending)
        every = ranges == (range(sum(stack.rows)),)
        moved = None if order is None else _ranges(order)
        return replace(stack, own=None if every else ranges, moved=moved), order

    def norm(self, name: str, width: int, eps: float) -> Norm:
        return Norm(self.tensor((f"{name}.weight",), (width,)), eps)

    def kv_scales(self, prefix: str, kv_heads: int) -> torch.Tensor | None:
        """Return the scales of the rank's KV heads: see `Attention.kv_scales`. prefix: of the attention's tensor names.
        kv_heads: of all ranks. Raises CheckpointError, ShardError.
        """
        if self._kv_scales is None:
            return None
        own = self.shard.kv_heads_of(kv_heads)
        return self._kv_scales(prefix, kv_heads)[:, own.start : own.stop].contiguous()

    def linear(
        self,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        columns: int,
        *,
        bias: bool,
        own: torch.Tensor | None = None,
        inputs: range | None = None,
        dequantized: bool = False,
    ) -> Linear:
        """Return one product for several with the same input. rows: outputs of each. own: int64, outputs to return in
        this order; None: all. inputs: the rank's part of `columns`, which gives a partial sum, with the bias on the
        first rank; None: all. dequantized: the weight must not stay quantized, because it is used outside a layer's
        product.
        """
        weights = tuple(f"{name}.weight" for name in names)
        stack, order = self._stack(TensorStack(weights, rows, (columns,), None, None, inputs), own)
        read = None if dequantized else self._quantized(stack)
        found = None if read is None else (read if order is None else read.rows(order)).packed()
        if found is not None:
            weight = torch.empty(found.shape, dtype=found.dtype, device="meta")
        else:
            weight = self._fill(stack)
            weight = self.pack(weight if order is None else in_order(weight, order))
        # Every rank requests it, so that random weights are equal on all of them.
        added = self.tensor(tuple(f"{name}.bias" for name in names), rows, own=own) if bias else None
        return Linear(weight, added if inputs is None or self.shard.is_first else None, found)

    def linear_and_row(self, name: str, row: str, outputs: int, columns: int) -> tuple[Linear, torch.Tensor]:
        """Return a product without a bias, and a vector, [columns], from a matrix of one row. They share one tensor if
        packing leaves matrices in place.
        """
        whole = self.tensor((f"{name}.weight", f"{row}.weight"), (outputs, 1), columns)
        matrix, vector = whole[:-1], whole[-1]
        packed = self.pack(matrix)
        # If the matrix was copied, the row would keep its old memory alive.
        return Linear(packed, None), vector if packed is matrix else vector.clone()

    def linears(
        self,
        names: Sequence[tuple[str, ...]],
        rows: tuple[int, ...],
        columns: int,
        *,
        own: torch.Tensor | None = None,
        inputs: range | None = None,
    ) -> tuple[Linear, ...]:
        """Return equal products of experts, without biases, one for each entry of `names`. names, rows, own, inputs: of
        one product, see `linear`; own: ascending. They share one tensor if packing leaves matrices in place.
        """
        every = tuple(f"{name}.weight" for each in names for name in each)
        mine = None if own is None else (torch.arange(len(names))[:, None] * sum(rows) + own).flatten()
        whole = TensorStack(every, rows * len(names), (columns,), inputs=inputs, experts=len(names))
        stack, order = self._stack(whole, mine)
        assert order is None
        if (read := self._quantized(stack)) is not None:
            found = read.experts(len(names))
            return tuple(Linear(torch.empty(one.shape, dtype=one.dtype, device="meta"), None, one) for one in found)
        return tuple(Linear(self.pack(weight), None) for weight in self._fill(stack).chunk(len(names)))


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a decoder. ropes: referenced by the attentions' numbers. parameters: as in the checkpoint, a tied
    matrix once. whole_embedding, whole_lm_head: for a draft head; a rank's part if none reads them. embedding_scale:
    multiplies embeddings. logit_cap: logits become logit_cap * tanh(logit / logit_cap); 0: off.
    """

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    final_norm: Norm  # over hidden
    lm_head: torch.Tensor  # [vocab, hidden], packed
    ropes: tuple[Rope, ...]
    parameters: int
    whole_embedding: torch.Tensor  # [vocab, hidden]
    whole_lm_head: torch.Tensor  # [vocab, hidden], packed
    embedding_scale: float = 1.0
    logit_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A draft head of one layer: attention and feed-forward on the output of `fuse` (a token's embedding and the
    previous hidden state), and the logits of its output.

    rope: the attention's. parameters: as in its checkpoint, without the target's. width: size of a stored hidden state.
        reads: numbers of target layers after which hidden states are read, combined by `narrow`; none: the target's
        final hidden state. read_norms: before `narrow`, one over the joined hidden states or one for each; may be
        empty. norm: before the head's matrix, or None. passes_normed: the next step gets the hidden state after that
        norm.
    embedding, lm_head: None: the target's. targets: int64 [draft vocab], the target's token of each row of `lm_head`,
        or the tokens guessed with the target's `lm_head`;
    None: all in order.
    """

    fuse: Fuse
    mixer: Attention
    feed_forward: FeedForward
    rope: Rope
    parameters: int
    width: int
    reads: tuple[int, ...] = ()
    narrow: Linear | None = None  # len(reads) * the target's hidden to width
    read_norms: tuple[Norm, ...] = ()  # each over an equal part of `narrow`'s input
    norm: Norm | None = None  # over width
    passes_normed: bool = False
    embedding: torch.Tensor | None = None  # [vocab, width]
    lm_head: torch.Tensor | None = None  # [draft vocab, width], packed
    targets: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class OwnHeads(Generic[ConfigT]):
    """Draft heads in an architecture's checkpoints.

    count: how many. build: makes the first one from named tensors. begins: prefix of its tensors in a checkpoint.
    named: maps a checkpoint's tensor name to `build`'s. in_file: the inverse.
    """

    count: Callable[[ConfigT], int]
    build: Callable[[ConfigT, TensorReader], HeadWeights]
    begins: str
    named: Callable[[str], str]
    in_file: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Whole:
    """A multimodal model, whose text part has this architecture and is described under `text_config`.

    name, model_type: as in the file. prefixes: prefixes of the text's tensors with their replacements in a text-only
    checkpoint; the first match counts. unread: keys beside `text_config` that affect no text. passed_over: whether a
    tensor belongs to another part.
    """

    name: str
    model_type: str
    prefixes: tuple[tuple[str, str], ...]
    unread: tuple[Unread, ...]
    passed_over: Callable[[str], bool]


def small(config: ConfigT, tokens: int) -> ConfigT:
    """Return the model with one layer of each kind, and windows of at most `tokens`."""
    own: Any = config
    few: ConfigT = replace(own, windows=tuple(min(window, tokens) for window in own.windows))
    kinds = list(zip(*(getattr(few, name) for name in BY_LAYER if hasattr(few, name)), strict=True))
    return with_layers(few, [kinds.index(kind) for kind in sorted(set(kinds))])


@dataclass(frozen=True, slots=True)
class Architecture(Generic[ConfigT]):
    """One line of the registry.

    name: in `architectures` of config.json. model_type: the matching one. models: known models, in words. understood:
        keys that `read` reads.
    unread: keys without effect, in addition to every architecture's. read: parses config.json after its keys were
        checked, with the end tokens; raises CheckpointError for an unsupported value. weights: builds the model from
        named tensors.
    layers: the possible kinds: attention, window, mamba2, gated_delta, dense, ungated, experts.
    whole: a multimodal model with this text part. small: a model to try kernels with: one layer of each kind at full
        width, with windows of at most the given number of tokens. heads: supported draft heads in the checkpoint; None:
        none. unstacked: splits the checkpoint's stacked tensors by name, and raises CheckpointError for a wrong shape;
        None: nothing is stacked. beside: how further names of tensors begin that are not the model's.
    """

    name: str
    model_type: str
    models: str
    understood: frozenset[str]
    unread: tuple[Unread, ...]
    read: Callable[[Mapping[str, Any], tuple[int, ...]], ConfigT]
    weights: Callable[[ConfigT, TensorReader], ModelWeights]
    small: Callable[[ConfigT, int], ConfigT] = small
    layers: tuple[str, ...] = ("attention", "dense")
    whole: Whole | None = None
    heads: OwnHeads[ConfigT] | None = None
    unstacked: Callable[[ConfigT, Mapping[str, StoredTensor]], Mapping[str, StoredTensor]] | None = None
    beside: Callable[[ConfigT], tuple[str, ...]] = lambda config: ()

    def passed_over(self, config: ConfigT, name: str) -> bool:
        """Whether an unrequested tensor may be ignored: it is a draft head's or otherwise beside the model, a copy of a
        tied matrix, or a buffer that a decoder computes."""
        beside = self.beside(config) if self.heads is None else (self.heads.begins, *self.beside(config))
        is_copy = config.tie_word_embeddings and name == LM_HEAD
        return is_copy or bool(_ROTARY_CACHE.fullmatch(name)) or name.startswith(beside)
