"""What the file of an architecture says: how its `config.json` is read, how its tensors are named, and its layers."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import torch

from runahead.runtime.checkpoint import StoredTensor
from runahead.runtime.kernels.layers import Attention, FeedForward, Fuse, Layer, Linear, Norm
from runahead.runtime.kernels.quantized_weight import Fp8Weight, QuantizedWeight
from runahead.runtime.kernels.share import WHOLE, Share
from runahead.runtime.models.config.keys import Unread
from runahead.runtime.models.config.model_config import BY_LAYER, ModelConfig, with_layers
from runahead.runtime.models.rope import Rope

ConfigT = TypeVar("ConfigT", bound=ModelConfig)  # an architecture's own
KvScales = Callable[[str, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TensorStack:
    """Tensors of a checkpoint that are stacked, by rows, into one of ours. rows: of each of them. dtype: of ours; None:
    the model's. own: rows of the stack that a rank has, ascending; None: all. inputs: columns that a rank has of each
    row; None: all."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...] = ()  # (in,) for a matrix, () for a vector
    dtype: torch.dtype | None = None
    own: tuple[range, ...] | None = None
    inputs: range | None = None

    def shape(self, index: int) -> tuple[int, ...]:
        """Of one of the tensors, whole."""
        return (self.rows[index], *self.columns)

    @property
    def own_rows(self) -> tuple[range, ...]:
        return (range(sum(self.rows)),) if self.own is None else self.own

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Of the rank's part of the stack."""
        columns = self.columns if self.inputs is None else (len(self.inputs),)
        return (sum(map(len, self.own_rows)), *columns)

    def pieces(self) -> Iterator[tuple[str, range]]:
        """The tensors that the rank's part is read from, in order, each with its rows that are read."""
        begins = list(accumulate(self.rows, initial=0))
        for own in self.own_rows:
            for number in range(bisect_right(begins, own.start) - 1, bisect_left(begins, own.stop)):
                begin, end = begins[number], begins[number + 1]
                yield self.names[number], range(max(own.start, begin) - begin, min(own.stop, end) - begin)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The rank's part of the stack. whole: all of it."""
        if self.own is not None:
            whole = torch.cat([whole[own.start : own.stop] for own in self.own])
        return whole if self.inputs is None else whole[:, self.inputs.start : self.inputs.stop].contiguous()


def _ranges(places: torch.Tensor) -> tuple[range, ...]:
    """Runs of consecutive numbers. places: int64 [n], ascending."""
    ends = ((places.diff() != 1).nonzero().flatten() + 1).tolist()
    return tuple(
        range(int(places[begin]), int(places[end - 1]) + 1) for begin, end in pairwise([0, *ends, places.numel()])
    )


class TensorReader:
    """Gives an architecture the tensors that it names, one after the other.

    fill: makes the rank's part of a stack: read, drawn, or without memory where a model is only described. pack: as
    `KernelSet.pack_weight`. share: the rank's part of the model, which an architecture asks for. quantized: makes the
    rank's part of a stack that stays quantized, and None of others. kv_scales: reads the scales of an attention's FP8
    keys and values, float32 [2, kv_heads], by the beginning of its tensors' names and its number of KV heads; None:
    keys and values are kept in the served dtype. parameters: numbers of the tensors given so far, each of them whole.
    """

    def __init__(
        self,
        fill: Callable[[TensorStack], torch.Tensor],
        pack: Callable[[torch.Tensor], torch.Tensor],
        share: Share = WHOLE,
        quantized: Callable[[TensorStack], QuantizedWeight | None] = lambda stack: None,
        kv_scales: KvScales | None = None,
    ):
        self._fill = fill
        self.pack = pack
        self.share = share
        self._quantized = quantized
        self._kv_scales = kv_scales
        self.parameters = 0

    def renamed(self, rename: Callable[[str], str]) -> TensorReader:
        """A reader whose tensors the checkpoint calls by other names. rename: of ours makes theirs."""

        def theirs(stack: TensorStack) -> TensorStack:
            return replace(stack, names=tuple(map(rename, stack.names)))

        scales = self._kv_scales
        return TensorReader(
            lambda stack: self._fill(theirs(stack)),
            self.pack,
            self.share,
            lambda stack: self._quantized(theirs(stack)),
            None if scales is None else lambda prefix, kv_heads: scales(rename(prefix), kv_heads),
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
        """The tensors of these names, stacked. rows: of each. dtype: None: the model's. own: int64, rows of the stack
        that are given, each at most once, in this order; None: all. inputs: columns that are given; None: all."""
        stack, order = self._stack(TensorStack(names, rows, columns, dtype, None, inputs), own)
        part = self._fill(stack)
        return part if order is None else part[order.to(part.device)]

    def _stack(self, stack: TensorStack, own: torch.Tensor | None) -> tuple[TensorStack, torch.Tensor | None]:
        """The stack with these of its rows, ascending, and in which order they are given; None: in this one."""
        self.parameters += sum(stack.rows) * math.prod(stack.columns)
        if own is None:
            return stack, None
        ascending = own.sort().values
        ranges = _ranges(ascending)
        every = ranges == (range(sum(stack.rows)),)
        order = torch.searchsorted(ascending, own)
        in_order = bool((order.diff() == 1).all())
        return replace(stack, own=None if every else ranges), None if in_order else order

    def norm(self, name: str, width: int, eps: float) -> Norm:
        return Norm(self.tensor((f"{name}.weight",), (width,)), eps)

    def kv_scales(self, prefix: str, kv_heads: int) -> torch.Tensor | None:
        """The scales of the rank's KV heads: see `Attention.kv_scales`. prefix: the beginning of the names of the
        attention's tensors. kv_heads: of all ranks together. Raises CheckpointError, ShareError."""
        if self._kv_scales is None:
            return None
        own = self.share.kv_heads_of(kv_heads)
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
        """One product of several that have the same input. rows: outputs of each. own: int64, which outputs of the
        checkpoint are given, in this order; None: all, as they are. inputs: the rank's own of `columns`, of which it
        gives a partial sum, the first rank with the bias; None: all. dequantized: the weight does not stay quantized,
        since it is not read by a product of a layer alone."""
        weights = tuple(f"{name}.weight" for name in names)
        stack, order = self._stack(TensorStack(weights, rows, (columns,), None, None, inputs), own)
        read = None if dequantized else self._quantized(stack)
        found: QuantizedWeight | Fp8Weight | None = read if read is None or order is None else read.rows(order)
        if isinstance(found, QuantizedWeight) and found.numbers.device.type != "cpu":
            found = found.for_gpu()
        if found is not None:
            weight = torch.empty(found.shape, dtype=found.dtype, device="meta")
        else:
            weight = self._fill(stack) if read is None else read.dequantized()
            weight = self.pack(weight if order is None else weight[order.to(weight.device)])
        # Every rank asks for it, so that random weights are the same numbers on all of them.
        added = self.tensor(tuple(f"{name}.bias" for name in names), rows, own=own) if bias else None
        return Linear(weight, added if inputs is None or self.share.is_first else None, found)

    def linear_and_row(self, name: str, row: str, outputs: int, columns: int) -> tuple[Linear, torch.Tensor]:
        """A product without a bias, and a vector, [columns], of a matrix of one row. They are read into one tensor, in
        which the row stays right behind the product where packing leaves matrices as they are."""
        whole = self.tensor((f"{name}.weight", f"{row}.weight"), (outputs, 1), columns)
        matrix, vector = whole[:-1], whole[-1]
        packed = self.pack(matrix)
        # Of a matrix that lies elsewhere now, the row would keep the memory.
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
        """Products that are alike, one for each entry of `names`, without biases. names, rows, own, inputs: of one, as
        `linear` has them; own: ascending. They are read into one tensor, of which each has its part where packing
        leaves matrices as they are."""
        every = tuple(f"{name}.weight" for each in names for name in each)
        mine = None if own is None else (torch.arange(len(names))[:, None] * sum(rows) + own).flatten()
        whole = self.tensor(every, rows * len(names), columns, own=mine, inputs=inputs)
        return tuple(Linear(self.pack(weight), None) for weight in whole.chunk(len(names)))


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of a decoder. ropes: how its attentions rotate, each of which names one by its number. parameters: as the
    checkpoint has them, a tied matrix once. embedding_scale: multiplies a token's row of the embedding. logit_cap:
    logits become logit_cap * tanh(logit / logit_cap); 0: they stay as they are."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    final_norm: Norm  # over hidden
    lm_head: torch.Tensor  # [vocab, hidden], packed
    ropes: tuple[Rope, ...]
    parameters: int
    embedding_scale: float = 1.0
    logit_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A draft head of one layer: its attention and its feed-forward over what `fuse` makes of a token's embedding and
    the hidden state before it, and the logits of what they leave.

    rope: how the attention rotates. parameters: as its checkpoint has them, without the target's own. width: numbers of
    a hidden state that is kept. reads: after how many of the target's layers each, the hidden states that `narrow`
    makes one of; none: the hidden state is the target's after its last norm. read_norms: in front of `narrow`, one over
    all that is read, joined, or one over each; none: there is none. norm: over what the layer leaves, before the head;
    None: there is none. passes_normed: the next step has the hidden state after that norm, and not before it.
    embedding, lm_head: None is the target's. targets: which token of the target each of `lm_head` is, int64
    [draft vocab], or which of them are guessed where `lm_head` is the target's; None: all, in their order.
    """

    fuse: Fuse
    mixer: Attention
    feed_forward: FeedForward
    rope: Rope
    parameters: int
    width: int
    reads: tuple[int, ...] = ()
    narrow: Linear | None = None  # len(reads) * the target's hidden to width
    read_norms: tuple[Norm, ...] = ()  # each over as large a part of what `narrow` reads
    norm: Norm | None = None  # over width
    passes_normed: bool = False
    embedding: torch.Tensor | None = None  # [vocab, width]
    lm_head: torch.Tensor | None = None  # [draft vocab, width], packed
    targets: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class OwnHeads(Generic[ConfigT]):
    """Draft heads that come with an architecture's checkpoints.

    count: how many there are. build: makes the first of tensors that it names. begins: how its tensors' names begin in
    a checkpoint. named: what `build` calls a tensor, by what a checkpoint calls it. in_file: the other way round.
    """

    count: Callable[[ConfigT], int]
    build: Callable[[ConfigT, TensorReader], HeadWeights]
    begins: str
    named: Callable[[str], str]
    in_file: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Whole:
    """A model of several parts, of which an architecture is the one for text: what `config.json` says of that stands
    there under `text_config`.

    name, model_type: as the file has them. prefixes: with which names of the text's tensors begin there, each with what
    stands in its place where the text lies alone; the first that fits counts. unread: keys beside `text_config` that
    change no number of a text. passed_over: whether a tensor is another part's.
    """

    name: str
    model_type: str
    prefixes: tuple[tuple[str, str], ...]
    unread: tuple[Unread, ...]
    passed_over: Callable[[str], bool]


def small(config: ConfigT, tokens: int) -> ConfigT:
    """The model with one layer of each kind. tokens: a window that is wider gets as many."""
    own: Any = config
    few: ConfigT = replace(own, windows=tuple(min(window, tokens) for window in own.windows))
    kinds = list(zip(*(getattr(few, name) for name in BY_LAYER if hasattr(few, name)), strict=True))
    return with_layers(few, [kinds.index(kind) for kind in sorted(set(kinds))])


@dataclass(frozen=True, slots=True)
class Architecture(Generic[ConfigT]):
    """One line of the registry.

    name: as `architectures` of config.json has it. model_type: what goes with it. models: that are known to be of it,
    in words. understood: keys that `read` reads.
    unread: keys that change no number here, beside those of every architecture. read: config.json, whose keys have been
    looked at, and the end tokens; raises CheckpointError for a value that can't be served. weights: builds the model
    from tensors that it names. passed_over: whether a tensor that is not asked for, by its name, changes nothing.
    layers: what its layers may be, of attention, window, mamba2, gated_delta, dense, ungated and experts.
    whole: a model of which this one may be a part. small: a model to try kernels with, which has one layer of each
    kind, as wide as it is here; what looks back over a number of tokens, such as a window, looks back over no more than
    the number given. heads: that come with it; None: none that is served. unstacked: the tensors of a checkpoint, by
    name, with parts of some as tensors of their own; raises CheckpointError for one of another shape; None: they are
    as `weights` and `heads` name them.
    """

    name: str
    model_type: str
    models: str
    understood: frozenset[str]
    unread: tuple[Unread, ...]
    read: Callable[[Mapping[str, Any], tuple[int, ...]], ConfigT]
    weights: Callable[[ConfigT, TensorReader], ModelWeights]
    passed_over: Callable[[ConfigT, str], bool]
    small: Callable[[ConfigT, int], ConfigT] = small
    layers: tuple[str, ...] = ("attention", "dense")
    whole: Whole | None = None
    heads: OwnHeads[ConfigT] | None = None
    unstacked: Callable[[ConfigT, Mapping[str, StoredTensor]], Mapping[str, StoredTensor]] | None = None
