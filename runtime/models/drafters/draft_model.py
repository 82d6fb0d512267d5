"""A whole, smaller model with the same vocabulary that drafts for another.

It runs like a draft head that reads no hidden state. Its keys and values are in the rows' blocks, as further layers
beside the target's: F writes the entries of all its query tokens, and the next F overwrites the guessed tokens'
entries. So finding the target's block finds the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.checkpoint import Checkpoint, CheckpointError
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.kernel_set import DraftKernelSet
from runahead.runtime.models.architecture import ModelWeights
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.cpu_check.cpu_kernels import choose_kernels
from runahead.runtime.models.decoder import Decoder, ReadHidden
from runahead.runtime.models.drafters.draft_head import DraftCache, DraftHead, read_by_a_step
from runahead.runtime.models.load import load_model
from runahead.runtime.models.memory import memory_of, weight_bytes
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.token_texts import token_texts
from runahead.runtime.models.weights import check_weights, described


class DraftModelSizes:
    """A draft model and its target on any device."""

    def __init__(self, model: Decoder, target: Decoder) -> None:
        self._model = model
        self._target = target

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self._model.weights)

    @property
    def parameters(self) -> int:
        return self._model.num_parameters

    @property
    def step_fraction(self) -> float:
        return read_by_a_step(self._model) / read_by_a_step(self._target)


class DraftModel(DraftModelSizes):
    """A draft model on the CPU, with the methods of `DraftHead`. Serves one thread."""

    @property
    def weights(self) -> ModelWeights:
        return self._model.weights

    def make_cache(self, num_blocks: int, block_size: int) -> DraftCache:
        cache = self._model.make_cache(num_blocks, block_size)
        return DraftCache(cache, np.zeros((num_blocks * block_size, 0), np.float32))

    def hidden_reader(self, seen: dict[int, torch.Tensor]) -> ReadHidden | None:
        return None

    def read(self, hidden: torch.Tensor, seen: dict[int, torch.Tensor]) -> NDArray[np.float32]:
        return np.zeros((len(hidden), 0), np.float32)

    def fill(self, batch: ForwardBatch, hidden: NDArray[np.float32], cache: DraftCache) -> None:
        self._model.forward(batch, cache.entries)

    def step(
        self, batch: ForwardBatch, hidden: NDArray[np.float32], cache: DraftCache
    ) -> tuple[NDArray[np.float32], torch.Tensor]:
        return hidden, self._model.logits(self._model.forward(batch, cache.entries))


DraftNetwork: TypeAlias = DraftHead | DraftModel


@dataclass(frozen=True, slots=True)
class DraftModelFiles:
    """A draft model whose configuration and tensors fit its target. No weight is read yet."""

    checkpoint: Checkpoint
    config: ModelConfig

    @property
    def parameters(self) -> int:
        """The number of trained parameters."""
        return described(self.config).parameters

    def shared(self, target: ModelConfig) -> frozenset[str]:
        """Return which of the target's matrices it reads: see `HeadFiles.shared`."""
        return frozenset()

    def block_bytes(self, block_size: int, dtype: torch.dtype = torch.float32) -> int:
        """Return its bytes in a KV block: keys and values of its layers."""
        return memory_of(described(self.config).layers).bytes_kept(block_size, dtype).block

    def load(self, target: Decoder, kernels: DraftKernelSet, positions: int, *, drawn: bool) -> DraftModel:
        """Load the model on the CPU in float32. kernels: the target's; this model's are tried separately, since its
        shapes differ. positions: the longest context. drawn: random weights, without reading a file.

        Raises CheckpointError, and NoKernelsError without row-invariant kernels.
        """
        own, _ = choose_kernels(self.config)
        cpu, how = torch.device("cpu"), "dummy" if drawn else "auto"
        model = load_model(self.checkpoint, cpu, torch.float32, how, own, None, positions, self.config)
        return DraftModel(model, target)


def open_draft_model(
    checkpoint: Checkpoint,
    target: ModelConfig,
    of_target: Checkpoint,
    context: int,
    setting: str,
    context_setting: str,
    *,
    has_weights: bool,
) -> DraftModelFiles:
    """Open the model in these files. target, of_target: its target. context: served tokens of a request. setting,
    context_setting: the settings' names in messages. has_weights: False for random weights, whose files are not read.

    Raises CheckpointError for a model that is unsupported, has recurrent states, another vocabulary, or too short a
    context.
    """
    called = f"the draft model {checkpoint.path}"
    try:
        config = load_config(checkpoint)
        if has_weights:
            check_weights(checkpoint, config)
    except CheckpointError as error:
        raise CheckpointError(f"{called}: {error}") from error
    called = f"{called} ({setting})"
    if any(kept.state for kept in memory_of(described(config).layers).kept):
        raise CheckpointError(
            f"{called} is of {config.architecture}, which keeps a recurrent state of each request: the effect of a "
            "wrong draft can't be undone, so such a model can't draft"
        )
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{called} has a vocabulary of {config.vocab_size} tokens, and the model one of {target.vocab_size}: it "
            "can't draft for it"
        )
    if config.max_position_embeddings < context:
        raise CheckpointError(
            f"{called} has a context of {config.max_position_embeddings} tokens, and {context} are served: set "
            f"{context_setting} to {config.max_position_embeddings} or less"
        )
    _check_tokens(called, checkpoint, of_target)
    return DraftModelFiles(checkpoint, config)


def _check_tokens(called: str, checkpoint: Checkpoint, of_target: Checkpoint) -> None:
    """Raise CheckpointError if both have a tokenizer and any id has different texts."""
    if not (checkpoint.has_tokenizer and of_target.has_tokenizer):
        return
    own, others = token_texts(checkpoint), token_texts(of_target)
    differing = sorted(number for number in own.keys() | others.keys() if own.get(number) != others.get(number))
    if differing:
        first = differing[0]
        raise CheckpointError(
            f"{called} has another vocabulary: {len(differing)} of its tokens differ from the model's, the "
            f"first of them token {first}, which is {own.get(first)!r} there and {others.get(first)!r} in the model"
        )
