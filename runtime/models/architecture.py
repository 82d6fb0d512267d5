"""What the file of an architecture says: how its `config.json` is read, how its tensors are named, and its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from runahead.runtime.checkpoint import StoredTensor
from runahead.runtime.kernels.layers import Attention, FeedForward, Fuse, Layer, Linear, Norm
from runahead.runtime.kernels.share import WHOLE, Share
from runahead.runtime.models.config import ModelConfig
from runahead.runtime.models.config_keys import Unread
from runahead.runtime.models.rope import Rope

ConfigT = TypeVar("ConfigT", bound=ModelConfig)  # an architecture's own


@dataclass(frozen=True, slots=True)
class TensorStack:
    """Tensors of a checkpoint that are stacked, by rows, into one of ours. rows: of each of them. dtype: of ours; None:
    the model's."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...] = ()  # (in,) for a matrix, () for a vector
    dtype: torch.dtype | None = None

    def shape(self, index: int) -> tuple[int, ...]:
        return (self.rows[index], *self.columns)


def taken(tensor: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """These rows of a tensor, int64, in this order. None: as it is."""
    return tensor if places is None else tensor[places.to(tensor.device)]


class TensorReader:
    """Gives an architecture the tensors that it names, one after the other.

    fill: makes the tensor of a stack: read, drawn, or without memory where a model is only described. pack: as
    `KernelSet.pack_weight`. share: the rank's part of experts and of recurrent mixers, which an architecture asks for.
    parameters: numbers given so far.
    """

    def __init__(
        self,
        fill: Callable[[TensorStack], torch.Tensor],
        pack: Callable[[torch.Tensor], torch.Tensor],
        share: Share = WHOLE,
    ):
        self._fill = fill
        self.pack = pack
        self.share = share
        self.parameters = 0

    def renamed(self, rename: Callable[[str], str]) -> TensorReader:
        """A reader whose tensors the checkpoint calls by other names. rename: of ours makes theirs."""

        def fill(stack: TensorStack) -> torch.Tensor:
            return self._fill(replace(stack, names=tuple(map(rename, stack.names))))

        return TensorReader(fill, self.pack, self.share)

    def tensor(
        self, names: tuple[str, ...], rows: tuple[int, ...], *columns: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The tensors of these names, stacked. rows: of each. dtype: None: the model's."""
        tensor = self._fill(TensorStack(names, rows, columns, dtype))
        self.parameters += tensor.numel()
        return tensor

    def norm(self, name: str, width: int, eps: float) -> Norm:
        return Norm(self.tensor((f"{name}.weight",), (width,)), eps)

    def linear(
        self,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        columns: int,
        *,
        bias: bool,
        order: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> Linear:
        """One product of several that have the same input. rows: outputs of each. order: int64 [outputs], which output
        of the checkpoint is where; None: as they are. inputs: int64, the rank's own of `columns`, of which it gives a
        partial sum, the first rank with the bias; None: all."""
        weight = taken(self.tensor(tuple(f"{name}.weight" for name in names), rows, columns), order)
        if inputs is not None:
            weight = taken(weight.T, inputs).T.contiguous()
            bias = bias and self.share.is_first
        own = taken(self.tensor(tuple(f"{name}.bias" for name in names), rows), order) if bias else None
        return Linear(self.pack(weight), own)

    def linear_and_row(self, name: str, row: str, outputs: int, columns: int) -> tuple[Linear, torch.Tensor]:
        """A product without a bias, and a vector, [columns], of a matrix of one row. They are read into one tensor, in
        which the row stays right behind the product where packing leaves matrices as they are."""
        whole = self.tensor((f"{name}.weight", f"{row}.weight"), (outputs, 1), columns)
        matrix, vector = whole[:-1], whole[-1]
        packed = self.pack(matrix)
        # Of a matrix that lies elsewhere now, the row would keep the memory.
        return Linear(packed, None), vector if packed is matrix else vector.clone()

    def linears(self, names: Sequence[tuple[str, ...]], rows: tuple[int, ...], columns: int) -> tuple[Linear, ...]:
        """Products that are alike, one for each entry of `names`, which is as `linear` has it. They are read into one
        tensor, of which each has its part where packing leaves matrices as they are."""
        every = tuple(f"{name}.weight" for each in names for name in each)
        whole = self.tensor(every, rows * len(names), columns)
        return tuple(Linear(self.pack(weight), None) for weight in whole.split(sum(rows)))

    def linears_of_one(self, name: str, count: int, rows: int, columns: int, own: range) -> tuple[Linear, ...]:
        """Products that are alike and that the checkpoint has in one tensor, [count, rows, columns]. own: which of them
        are given, and keep their memory."""
        whole = self.tensor((f"{name}.weight",), (count,), rows, columns)
        part = whole if len(own) == count else whole[own.start : own.stop].clone()
        return tuple(Linear(self.pack(weight), None) for weight in part)


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
    small: Callable[[ConfigT, int], ConfigT]
    layers: tuple[str, ...] = ("attention", "dense")
    whole: Whole | None = None
    heads: OwnHeads[ConfigT] | None = None
    unstacked: Callable[[ConfigT, Mapping[str, StoredTensor]], Mapping[str, StoredTensor]] | None = None
