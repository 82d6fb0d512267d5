"""The files of a draft head, checked against its target model.

`pytorch_model.bin` is read for a head alone, since EAGLE-1 heads are published only so. The archive is checked first
(`runahead.runtime.checkpoint.torch_archive`); torch's restricted reader then makes only tensors and containers, and the
tensors stay in the file until each was found to fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.checkpoint import Checkpoint, CheckpointError, StoredTensor
from runahead.runtime.checkpoint.folder import FolderCheckpoint
from runahead.runtime.checkpoint.refusals import AGAIN
from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor
from runahead.runtime.checkpoint.torch_archive import MOST_AROUND, check_archive
from runahead.runtime.kernels.kernel_set import DraftKernelSet
from runahead.runtime.kernels.layer_products import products_of
from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.architecture import EMBEDDING, LM_HEAD, HeadWeights, TensorReader, TensorStack
from runahead.runtime.models.blocks.dense import DenseConfig
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.drafters.draft_head import DraftHead
from runahead.runtime.models.memory import memory_of
from runahead.runtime.models.token_texts import token_texts
from runahead.runtime.models.weights import Pack, copy_stored, drawing, is_copy, read_safetensors, rows_of
from runahead.runtime.rounding import ceil_div

MULTIPLES: Final = (64, 128, 256, 512)  # to which vocabularies are padded

_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_WITH_INTEGERS: Final = (*_FLOATS, torch.int64, torch.int32, torch.bool)
_NUMBERS_AT_ONCE: Final = 1 << 24


def is_padded(rows: int, tokens: int) -> bool:
    """Whether `rows` is `tokens` with optional padding."""
    return rows == tokens or rows in {ceil_div(tokens, multiple) * multiple for multiple in MULTIPLES}


@dataclass(frozen=True, slots=True)
class FirstRows:
    """A `StoredTensor` without its last rows. whole: the stored tensor. rows: to read, at least 1."""

    whole: StoredTensor
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.whole.shape[1:])

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    @property
    def size_bytes(self) -> int:
        return self.whole.size_bytes

    def check(self, shape: tuple[int, ...]) -> None:
        self.whole.check((self.whole.shape[0], *shape[1:]))

    def pieces(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        for rows, numbers in rows_of(self.whole, range(self.rows)):
            yield rows, numbers.numpy()


def without_padding(stored: StoredTensor, tokens: int) -> StoredTensor:
    """Return the tensor without padding rows, or unchanged if it has another size."""
    rows = stored.shape[0] if stored.shape else 0
    return FirstRows(stored, tokens) if rows != tokens and is_padded(rows, tokens) else stored


def whole_tensor(stored: StoredTensor) -> torch.Tensor | None:
    """Read a small tensor in its stored dtype, None if it is packed. Raises CheckpointError."""
    if isinstance(stored, SafetensorsTensor):
        return read_safetensors(stored)
    return stored.tensor if isinstance(stored, TorchTensor) else None


def check_tokens_end(called: str, checkpoint: Checkpoint, in_draft: StoredTensor | None, tokens: int) -> None:
    """Raise CheckpointError if a head knows tokens beyond `tokens`, by its tokenizer or tensor t2d, which has for each
    token whether the draft vocabulary has it. called: its name in messages.
    """
    if checkpoint.has_tokenizer and (beyond := [number for number in token_texts(checkpoint) if number >= tokens]):
        raise CheckpointError(
            f"{called}: its tokenizer knows token {min(beyond)}, and the model has {tokens} tokens: it was made for "
            "another model"
        )
    if in_draft is not None and in_draft.shape[:1] > (tokens,):
        named = whole_tensor(in_draft)
        beyond = [] if named is None else (torch.nonzero(named.flatten()[tokens:]).flatten() + tokens).tolist()
        if beyond:
            raise CheckpointError(
                f"{called}: tensor t2d has token {beyond[0]} in the draft vocabulary, and the model has {tokens} "
                "tokens: it was made for another model"
            )


_INTEGERS: Final = (torch.int64, torch.int32)
_ROUNDED: Final = 2.0**-7  # twice the relative error of rounding to bfloat16
_FLUSHED: Final = 1e-7  # absolute error of a number below float16's range
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head whose files fit its target. No weight is read yet.

    called: its name in messages. kind: in words. stored: its tensors, by the names of `build`.
    build: makes the head. copies: optional copies of the target's embedding, which are not read, with their shapes.
    in_file: maps to the files' tensor names.
    """

    called: str
    kind: str
    stored: Mapping[str, StoredTensor]
    build: Callable[[TensorReader], HeadWeights]
    copies: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    in_file: Callable[[str], str] = str

    @property
    def parameters(self) -> int:
        """The head's trained parameters."""
        return _described(self.build)[0].parameters

    def shared(self, target: ModelConfig) -> frozenset[str]:
        """Return which of the target's EMBEDDING and LM_HEAD it reads."""
        head, _ = _described(self.build)
        found = {EMBEDDING: head.embedding, LM_HEAD: head.lm_head}
        names = frozenset(name for name, own in found.items() if own is None)
        return frozenset({EMBEDDING}) if target.tie_word_embeddings and names else names

    def shapes(self) -> list[tuple[int, int]]:
        """Return (in, out) of every product with its matrices, or rows of the target's."""
        head, _ = _described(self.build)
        linears = (head.fuse.product, head.narrow, *products_of(Layer(head.mixer, head.feed_forward)))
        matrices = [*(linear.weight for linear in linears if linear is not None), head.lm_head]
        found = [(matrix.shape[1], matrix.shape[0]) for matrix in matrices if matrix is not None]
        of_some = [(head.width, len(head.targets))] if head.lm_head is None and head.targets is not None else []
        return [*found, *of_some]

    def block_bytes(self, block_size: int, dtype: torch.dtype = torch.float32) -> int:
        """Return its bytes in a KV block: its layer's keys and values, and the hidden states that it reads."""
        head, _ = _described(self.build)
        entries = memory_of((Layer(head.mixer, head.feed_forward),)).bytes_kept(block_size, dtype)
        return entries.block + block_size * head.width * dtype.itemsize

    def weights(
        self, pack: Pack, device: torch.device = _CPU, dtype: torch.dtype = torch.float32, *, drawn: bool = False
    ) -> HeadWeights:
        """Load the head on this device in this dtype. drawn: random weights, without reading a file. Raises
        CheckpointError.
        """

        def read(stack: TensorStack) -> torch.Tensor:
            whole = torch.empty((sum(stack.rows), *stack.columns), dtype=stack.dtype or dtype, device=device)
            for name, part in zip(stack.names, whole.split(stack.rows), strict=True):
                copy_stored(self.stored[name], part)
            return whole

        weights = self.build(TensorReader(drawing(dtype, device) if drawn else read, pack))
        # The guessed tokens are read on the CPU for any device.
        return weights if weights.targets is None else replace(weights, targets=weights.targets.to(device))

    def load(self, target: Decoder, kernels: DraftKernelSet, positions: int, *, drawn: bool) -> DraftHead:
        """Load the head on the CPU. positions: the longest context. drawn: see `weights`. Raises CheckpointError."""
        return DraftHead(self.weights(kernels.pack_weight, drawn=drawn), target, kernels, positions)

    def check(self) -> None:
        """Raise CheckpointError that names a missing, unknown or wrongly shaped tensor."""
        expected = self.expected()
        for name, shape in expected.items():
            if name not in self.stored:
                raise CheckpointError(f"{self.called} has no tensor {self.in_file(name)}")
            self.stored[name].check(shape)
        for name, tensor in self.stored.items():
            if name in self.copies:
                tensor.check(self.copies[name])
            elif name not in expected:
                raise CheckpointError(
                    f"{self.called} has a tensor {self.in_file(name)}, which {self.kind} does not have"
                )

    def check_copies(self, target: Decoder) -> None:
        """Raise CheckpointError that names a tensor which should be a copy of the target's and differs. The two may be
        rounded to different dtypes.
        """
        for name in self.copies:
            if name in self.stored and not is_copy(
                self.stored[name], target.weights.whole_embedding, _ROUNDED, _FLUSHED
            ):
                raise CheckpointError(
                    f"{self.called} has a tensor {self.in_file(name)} that differs from the model's embedding; heads "
                    "that share the model's embedding are served"
                )

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Return the head's tensor shapes by the names of `build`, in order."""
        _, stacks = _described(self.build)
        return {name: stack.shape(i) for stack in stacks for i, name in enumerate(stack.names)}


def _described(build: Callable[[TensorReader], HeadWeights]) -> tuple[HeadWeights, list[TensorStack]]:
    """Return the head without values, and the stacks of its tensors."""
    stacks: list[TensorStack] = []

    def fill(stack: TensorStack) -> torch.Tensor:
        stacks.append(stack)
        return torch.empty((sum(stack.rows), *stack.columns), device="meta")

    return build(TensorReader(fill, lambda weight: weight)), stacks


def read_tensors(
    checkpoint: FolderCheckpoint, most: Callable[[TensorReader], HeadWeights], vocab: int
) -> Mapping[str, StoredTensor]:
    """Return the tensors of a head's files by their names there. most: makes the head with every possible tensor, whose
    size bounds a file of torch.save. vocab: the target's. Raises CheckpointError.
    """
    if checkpoint.has_safetensors:
        return checkpoint.tensors()
    head, stacks = _described(most)
    numbers = sum(math.prod(stack.shape(i)) for stack in stacks for i in range(len(stack.names)))
    padding = max(MULTIPLES)  # rows of an embedding and of a head's matrix
    # Also d2t, 8 bytes a token, and t2d, one byte.
    most_bytes = torch.float32.itemsize * (numbers + 2 * padding * head.width) + 9 * (vocab + padding)
    return read_torch_file(checkpoint.torch_file, most_bytes)


def may_have_head(target: ModelConfig) -> bool:
    """Whether a model leaves the hidden states that heads expect: with scaled logits, the last norm is scaled."""
    return bool(getattr(target, "logits_scaling", 1.0) == 1.0)


def check_fits(head: str, config: DenseConfig, target: ModelConfig, context: int, context_setting: str) -> None:
    """Raise CheckpointError for a head of any kind that can't draft for the model. head: its name in messages. context:
    served tokens of a request. context_setting: its setting's name in messages.
    """
    if not may_have_head(target):
        raise CheckpointError(
            f"{head} can't draft for this {target.architecture}, whose logits_scaling is in the hidden states that a "
            "head would read"
        )
    if config.num_layers != 1:
        raise CheckpointError(f"{head} has {config.num_layers} layers; heads of one layer are served")
    if not is_padded(config.vocab_size, target.vocab_size):
        raise CheckpointError(
            f"{head} has a vocabulary of {config.vocab_size} tokens, and the model one of {target.vocab_size}: it was "
            "made for another model"
        )
    if config.max_position_embeddings < context:
        raise CheckpointError(
            f"{head} has a context of {config.max_position_embeddings} tokens, and {context} are served: set "
            f"{context_setting} to {config.max_position_embeddings} or less"
        )


def check_width(head: str, width: int, target: ModelConfig) -> None:
    """Raise CheckpointError if the head reads hidden states of another size than the model's."""
    if width != target.hidden_size:
        raise CheckpointError(
            f"{head} reads hidden states of {width} numbers, and the model leaves {target.hidden_size}: "
            "it was made for another model"
        )


def targets_of(called: str, stored: StoredTensor, known: int, target: ModelConfig, why: str) -> torch.Tensor:
    """Return the target's token of each of the head's tokens, int64 [known]. stored: tensor d2t, the offset of each.
    why: the reason for the number, for messages. Raises CheckpointError.
    """
    if known > target.vocab_size:
        raise CheckpointError(f"{called}: tensor d2t has {known} tokens, and the model {target.vocab_size}")
    added = whole_tensor(stored) if stored.shape == (known,) else None
    if added is None or added.dtype not in _INTEGERS:
        raise CheckpointError(f"{called}: tensor d2t must be {known} integers of 64 or 32 bits, {why}")
    targets = torch.arange(known) + added.long()
    if not 0 <= int(targets.min()) <= int(targets.max()) < target.vocab_size or len(targets.unique()) < known:
        raise CheckpointError(
            f"{called}: tensor d2t must give each of {known} tokens one of the model's {target.vocab_size} to itself"
        )
    return targets


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A `StoredTensor` of `pytorch_model.bin`. tensor: on the CPU, in the file's memory map."""

    name: str
    path: Path
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize

    def check(self, shape: tuple[int, ...]) -> None:
        """Check the tensor's shape and dtype. Raises CheckpointError."""
        if self.tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"tensor {self.name} of {self.path} is of {self.tensor.dtype}; supported are "
                f"{', '.join(map(str, _FLOATS))}"
            )
        if self.shape != shape:
            raise CheckpointError(
                f"tensor {self.name} of {self.path} has shape {list(self.shape)}; config.json asks for {list(shape)}"
            )

    def pieces(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        rows = len(self.tensor)
        step = max(1, _NUMBERS_AT_ONCE // max(1, math.prod(self.shape[1:])))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            yield slice(begin, end), self.tensor[begin:end].float().contiguous().numpy()


def read_torch_file(path: Path, most: int) -> dict[str, TorchTensor]:
    """Return the tensors of `pytorch_model.bin` by name. most: bound of their bytes, from the head's configuration.

    Raises CheckpointError for a file larger than that plus `MOST_AROUND`, which is not opened; for what `check_archive`
    refuses; and for an unreadable file or other objects.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    if size > most + MOST_AROUND:
        raise CheckpointError(
            f"{path} has {size} bytes, and the tensors of a head as its config.json describes it take at most {most}: "
            "it holds something else, and was not opened"
        )
    check_archive(path)
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # any error of a damaged file: none of it is used
        # torch's message recommends to read the file without restrictions.
        raise CheckpointError(f"{path} can't be read as tensors ({type(error).__name__}); {AGAIN}") from None
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds no dictionary of tensors, but an object of {type(loaded).__name__}")
    return {_name(path, name): _tensor(path, name, value) for name, value in loaded.items()}


def _name(path: Path, name: object) -> str:
    if not isinstance(name, str):
        raise CheckpointError(f"{path} calls a tensor {name!r}; a name must be a text")
    return name


def _tensor(path: Path, name: str, value: object) -> TorchTensor:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(f"{path} holds {name}, an object of {type(value).__name__}; tensors alone are read")
    assert isinstance(value, torch.Tensor)
    of_others = value.layout is not torch.strided or value.device.type != "cpu" or value.is_neg()
    if of_others or value.dtype not in _WITH_INTEGERS:
        raise CheckpointError(
            f"{path} holds {name}, a tensor of {value.dtype}, {value.layout}, on {value.device}; ordinary ones of "
            f"{', '.join(map(str, _WITH_INTEGERS))} are read"
        )
    return TorchTensor(name, path, value.detach())
