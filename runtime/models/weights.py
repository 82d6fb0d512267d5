"""A checkpoint's tensors, checked against its configuration and packed for the decoder."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Final, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from runahead.runtime.checkpoint import Checkpoint, CheckpointError, StoredTensor
from runahead.runtime.checkpoint.folder import FolderCheckpoint
from runahead.runtime.checkpoint.quantized.find import without_empty_biases
from runahead.runtime.checkpoint.refusals import AGAIN
from runahead.runtime.checkpoint.safetensors_header import SafetensorsTensor
from runahead.runtime.kernels.layer_products import kinds_that_stay
from runahead.runtime.kernels.quantized_weight import QuantizedWeight
from runahead.runtime.kernels.ranks import WHOLE, Shard, ShardError
from runahead.runtime.models.architecture import EMBEDDING, LM_HEAD, ModelWeights, TensorReader, TensorStack, Whole
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.kv_scales import StoredKvScales
from runahead.runtime.models.quantized_linears import held_quantized, made_quantized, read_quantized
from runahead.runtime.models.registry import ARCHITECTURES

Pack = Callable[[torch.Tensor], torch.Tensor]  # KernelSet.pack_weight
Progress = Callable[[int, int], None]  # bytes done, bytes in all
StoredT = TypeVar("StoredT", bound=StoredTensor)

_ROWS_AT_ONCE: Final = 4096
_OF_QUANTIZED: Final = (".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".SCB")
_NORMS: Final = re.compile(r".*norm(_f)?\.weight")
# Random numbers of float32 at a time, 64 MiB. A whole embedding of float32 beside the weights would take GiBs, which a
# GPU's allocator keeps, and which the KV cache then lacks.
_DRAWN_AT_ONCE: Final = 1 << 24


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    pack: Pack,
    progress: Progress | None = None,
    shard: Shard = WHOLE,
    quantize: str = "none",
    kv_dtype: str = "auto",
    shared: Collection[str] = (),
) -> ModelWeights:
    """Read every tensor that `config` asks for, converted to `dtype` on `device`, one after the other; matrices that
    are quantized stay so where the device's kernels take them. shard: of the model, the rank's part; only the rows and
    columns of this part are read from safetensors files. quantize: fp8 or int4 makes this of matrices of 16 bits or
    more. kv_dtype: fp8 reads the scales of keys and values too. shared: see `TensorReader`.

    Raises ShardError where ranks can't have equal parts, CheckpointError as `check_weights`, for a tensor that can't be
    read after all, and for a tied head that is stored and differs from the embedding.
    """
    stored = check_weights(checkpoint, config)
    kinds = kinds_that_stay(described(config, shard).layers, device.type)
    total = sum(tensor.size_bytes for tensor in stored.values())
    done = 0

    def fill(stack: TensorStack) -> torch.Tensor:
        part, begin = torch.empty(stack.own_shape, dtype=stack.dtype or dtype, device=device), 0
        for name, rows in stack.pieces():
            copy_stored(stored[name], part[begin : begin + len(rows)], rows, stack.inputs)
            begin += len(rows)
        read(stack)
        return part

    def quantized(stack: TensorStack) -> QuantizedWeight | None:
        form = held_quantized(stack, stored, dtype, device.type, kinds, quantize)
        if form is None:
            return None
        if form.is_made:
            return made_quantized(form.kind, stack, fill(replace(stack, inputs=None)))
        found = read_quantized(form, stack, stored, dtype, device)
        read(stack)
        return found

    def read(stack: TensorStack) -> None:
        nonlocal done
        for name in stack.names:
            done += stored[name].size_bytes
            if progress is not None:
                progress(done, total)

    scales = _kv_scales(checkpoint, config, device) if kv_dtype == "fp8" else None
    tensors = TensorReader(fill, pack, shard, quantized, None if scales is None else scales.of, shared)
    weights = ARCHITECTURES[config.architecture].weights(config, tensors)
    if scales is not None:
        _check_all_read(config, scales)
    first = shard.rank * len(weights.embedding)
    if _has_tied_copy(config, stored) and not is_copy(stored[LM_HEAD], weights.embedding, first=first):
        raise CheckpointError(
            f"{checkpoint.path} has a tensor {checkpoint.tensor_in_file(LM_HEAD)} that differs from "
            f"{checkpoint.tensor_in_file(EMBEDDING)}, and by config.json (tie_word_embeddings) the two are one: set "
            "tie_word_embeddings to false to serve the model with this head, or remove the tensor"
        )
    if progress is not None and done != total:  # what was skipped: a tied head, rotary caches, other ranks' parts
        progress(total, total)
    return weights


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    pack: Pack,
    seed: int = 0,
    shard: Shard = WHOLE,
    quantize: str = "none",
    kv_dtype: str = "auto",
    shared: Collection[str] = (),
) -> ModelWeights:
    """Random weights of the configured shape, the same for the same seed: norms near 1, products that keep scale.
    shard: the rank's part of them, which are the same numbers for any number of ranks. quantize, kv_dtype, shared:
    as `load_weights`; scales of keys and values are 1."""
    fill = drawing(dtype, device, seed)
    kinds = kinds_that_stay(described(config, shard).layers, device.type)

    def quantized(stack: TensorStack) -> QuantizedWeight | None:
        form = held_quantized(stack, {}, dtype, device.type, kinds, quantize)
        return None if form is None else made_quantized(form.kind, stack, fill(replace(stack, inputs=None)))

    scales = StoredKvScales({}, device).of if kv_dtype == "fp8" else None
    return ARCHITECTURES[config.architecture].weights(
        config, TensorReader(fill, pack, shard, quantized, scales, shared)
    )


def drawing(dtype: torch.dtype, device: torch.device, seed: int = 0) -> Callable[[TensorStack], torch.Tensor]:
    """What makes the tensors of `dummy_weights`, for a `TensorReader`."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def fill(stack: TensorStack) -> torch.Tensor:
        whole = torch.empty((sum(stack.rows), *stack.columns), dtype=stack.dtype or dtype, device=device)
        for piece in whole.view(-1).split(_DRAWN_AT_ONCE):
            drawn = torch.randn(piece.shape, generator=generator, device=device, dtype=torch.float32)
            if stack.columns:
                drawn.mul_(stack.columns[-1] ** -0.5)
            else:
                drawn.mul_(0.02).add_(1.0 if _NORMS.fullmatch(stack.names[0]) else 0.0)
            piece.copy_(drawn)
        return stack.part_of(whole)

    return fill


def described(config: ModelConfig, shard: Shard = WHOLE) -> ModelWeights:
    """The model that `config` asks for, its tensors without memory or values (torch's device `meta`), not packed.
    shard: as `load_weights` has it. Raises ShardError."""
    return described_stacks(config, shard)[0]


def described_stacks(
    config: ModelConfig, shard: Shard = WHOLE
) -> tuple[ModelWeights, list[TensorStack], set[TensorStack]]:
    """Return `described`, the stacks of tensors that the model is made of, and the stacks of matrices that may stay
    quantized."""
    stacks: list[TensorStack] = []
    offered: set[TensorStack] = set()

    def fill(stack: TensorStack) -> torch.Tensor:
        stacks.append(stack)
        return torch.empty(stack.own_shape, dtype=stack.dtype, device="meta")

    tensors = TensorReader(fill, lambda weight: weight, shard, offered.add)
    return ARCHITECTURES[config.architecture].weights(config, tensors), stacks, offered


def check_weights(checkpoint: Checkpoint, config: ModelConfig) -> Mapping[str, StoredTensor]:
    """The tensors that the checkpoint's files describe, by name. No weight is read.

    Raises CheckpointError, naming the tensor, if one is missing, unknown, of another shape, stored in a way that is not
    supported, or cut off; naming the file, if one is missing or unreadable.
    """
    whole = ARCHITECTURES[config.architecture].whole
    stored = checkpoint.tensors()
    stored = stored if whole is None else _of_text(stored, whole)
    unstacked = ARCHITECTURES[config.architecture].unstacked
    stored = stored if unstacked is None else unstacked(config, stored)
    _, stacks, _ = described_stacks(config)
    expected = {name: stack.shape(i) for stack in stacks for i, name in enumerate(stack.names)}
    stored = without_empty_biases(stored, expected)
    for name, shape in expected.items():
        if name not in stored:
            raise CheckpointError(f"{checkpoint.path} has no tensor {name}; {AGAIN}")
        stored[name].check(shape)
    if _has_tied_copy(config, stored):
        stored[LM_HEAD].check(expected[EMBEDDING])
    passed_over = ARCHITECTURES[config.architecture].passed_over
    for name in stored:
        if name not in expected and not passed_over(config, name):
            raise CheckpointError(
                f"{checkpoint.path} has a tensor {checkpoint.tensor_in_file(name)}, which {config.architecture} does "
                f"not know{_hint(name)}"
            )
    return stored


def _kv_scales(checkpoint: Checkpoint, config: ModelConfig, device: torch.device) -> StoredKvScales:
    stored = checkpoint.kv_scales() if isinstance(checkpoint, FolderCheckpoint) else {}
    whole = ARCHITECTURES[config.architecture].whole
    return StoredKvScales(stored if whole is None else _of_text(stored, whole), device)


def _check_all_read(config: ModelConfig, scales: StoredKvScales) -> None:
    """Raises CheckpointError for scales of keys or values of an attention that the model does not have."""
    passed_over = ARCHITECTURES[config.architecture].passed_over
    for name in sorted(scales.unread):
        if not passed_over(config, name):
            raise CheckpointError(
                f"tensor {name} is a scale of keys or values, and {config.architecture} has no such attention; {AGAIN}"
            )


def _has_tied_copy(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> bool:
    """Does the checkpoint store the head of a tied model, which is read from the embedding?"""
    return config.tie_word_embeddings and LM_HEAD in stored


def is_copy(stored: StoredTensor, of: torch.Tensor, rtol: float = 0.0, atol: float = 0.0, first: int = 0) -> bool:
    """Whether rows of `stored`, from row `first` on, converted to the dtype of `of`, have its numbers. rtol, atol: as
    `torch.allclose` has them. of: [rows, columns]. Raises CheckpointError."""
    return all(
        torch.allclose(numbers.to(of.dtype), of[rows.start - first : rows.stop - first].cpu(), rtol, atol, True)
        for rows, numbers in rows_of(stored, range(first, first + len(of)))
    )


def rows_of(stored: StoredTensor, rows: range) -> Iterator[tuple[slice, torch.Tensor]]:
    """Consecutive rows of a tensor, a bounded piece at a time: which rows, and float32 [rows, columns] on the CPU.
    Raises CheckpointError."""
    if not isinstance(stored, SafetensorsTensor):
        for part, numbers in stored.pieces():
            first, last = max(part.start, rows.start), min(part.stop, rows.stop)
            if first < last:
                yield slice(first, last), torch.from_numpy(numbers[first - part.start : last - part.start])
        return
    for begin in range(rows.start, rows.stop, _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, rows.stop)
        yield slice(begin, end), read_safetensors(stored, range(begin, end)).float()


def _of_text(stored: Mapping[str, StoredT], whole: Whole) -> Mapping[str, StoredT]:
    """Return the text model's tensors by their names in a text-only checkpoint, without other parts' tensors. Raises
    CheckpointError if two have the same name."""

    def name_of(name: str) -> str:
        for prefix, alone in whole.prefixes:
            if name.startswith(prefix):
                return alone + name.removeprefix(prefix)
        return name

    of_text = {name: name_of(name) for name in stored if not whole.passed_over(name)}
    names = {alone: name for name, alone in of_text.items()}
    for name, alone in of_text.items():
        if names[alone] != name:
            raise CheckpointError(
                f"the tensors {name} and {names[alone]} are the same one of the text, {alone}; {AGAIN}"
            )
    return {alone: stored[name] for alone, name in names.items()}


def _hint(name: str) -> str:
    """What to do about a tensor whose name says what the model is."""
    if name.endswith(_OF_QUANTIZED):
        return f": it is part of a quantized weight, and quantization_config does not say of which kind; {AGAIN}"
    if ".lora_" in name:
        return ": it is a LoRA adapter's; merge the adapter into its base model first"
    return ""


def copy_stored(
    stored: StoredTensor, part: torch.Tensor, rows: range | None = None, inputs: range | None = None
) -> None:
    """Into `part`, in its dtype and on its device. rows, inputs: rows and columns that are copied; None: all. Raises
    CheckpointError."""
    rows = range(stored.shape[0]) if rows is None else rows
    if isinstance(stored, SafetensorsTensor):
        part.copy_(read_safetensors(stored, rows, inputs))
        return
    for taken, numbers in rows_of(stored, rows):
        found = numbers if inputs is None else numbers[:, inputs.start : inputs.stop]
        part[taken.start - rows.start : taken.stop - rows.start].copy_(found)


def read_safetensors(stored: SafetensorsTensor, rows: range | None = None, inputs: range | None = None) -> torch.Tensor:
    """The tensor on the CPU, in the dtype it is stored in. rows, inputs: rows and columns that are read; None: all.
    Raises CheckpointError."""
    index: tuple[int | slice, ...] = ()
    begin = 0
    if stored.part is not None:
        number, begin, _ = stored.part
        index = (number,)
    if stored.shape:
        rows = range(stored.shape[0]) if rows is None else rows
        index = (*index, slice(begin + rows.start, begin + rows.stop))
    if inputs is not None:
        index = (*index, slice(inputs.start, inputs.stop))
    is_whole = stored.part is None and inputs is None and (rows is None or len(rows) == stored.shape[0])
    try:
        with safe_open(stored.path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(stored.name) if is_whole else file.get_slice(stored.name)[index]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"tensor {stored.name} can't be read from {stored.path}: {error}") from error
    return tensor


def why_not_divided(config: ModelConfig, ranks: int) -> str:
    """Say why this number of ranks can't share the model, empty if they can. All ranks' parts have the same shapes, so
    the first one is representative.
    """
    try:
        part_of(config, ranks)
    except ShardError as error:
        return str(error)
    return ""


def part_of(config: ModelConfig, ranks: int) -> ModelWeights:
    """Describe the first rank's part of the model (`described`)."""
    return described(config, Shard(0, ranks))
