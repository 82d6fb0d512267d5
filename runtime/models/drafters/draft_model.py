"""A whole model that drafts for another: smaller, of the same vocabulary.

It is run as a draft head that reads no hidden state. Its keys and values of every token lie in the blocks of the rows,
as more layers beside the target's: F makes those of all of its query tokens, and what the model makes of tokens that it
has guessed the next F writes over. So whoever finds the target's block finds the model's.
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
from runahead.runtime.kernels.layer_products import idle_in
from runahead.runtime.models.architecture import ModelWeights
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.cpu_check.cpu_kernels import choose_kernels
from runahead.runtime.models.decoder import Decoder, ReadHidden
from runahead.runtime.models.drafters.draft_head import DraftCache, DraftHead
from runahead.runtime.models.load import load_model
from runahead.runtime.models.memory import memory_of, weight_bytes
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.token_texts import token_texts
from runahead.runtime.models.weights import check_weights, described


class DraftModelSizes:
    """A model and its target, on whatever device."""

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
    def step_share(self) -> float:
        return read_by_a_step(self._model) / read_by_a_step(self._target)


class DraftModel(DraftModelSizes):
    """On the CPU, with the methods of `DraftHead`. Serves one thread."""

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
    """A model whose configuration and tensors fit the one that it is to draft for. No weight is read yet."""

    checkpoint: Checkpoint
    config: ModelConfig

    @property
    def weight_bytes(self) -> int:
        """Bytes of its tensors in float32, as they are on the CPU."""
        return self.parameters * torch.float32.itemsize

    @property
    def parameters(self) -> int:
        """Trained numbers."""
        return described(self.config).parameters

    def block_bytes(self, block_size: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of a KV block: keys and values of its layers."""
        return memory_of(described(self.config).layers).bytes_kept(block_size, dtype).block

    def load(self, target: Decoder, kernels: DraftKernelSet, positions: int, *, drawn: bool) -> DraftModel:
        """The model on the CPU, in float32. kernels: of the target; those of this one are tried by themselves, since
        its shapes are others. positions: the longest context. drawn: its numbers are random, and no file is read.

        Raises CheckpointError, and NoKernelsError where no kernels keep rows apart.
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
    """The model in these files. target, of_target: the one that it drafts for. context: tokens of a request that are
    served. setting, context_setting: what messages call the one that names the files, and the one of the context.
    has_weights: False where weights are drawn, and no file of them is looked at.

    Raises CheckpointError for a model that can't be served, keeps a recurrent state, has another vocabulary, or a
    context that is shorter than the one that is served.
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
            f"{called} is of {config.architecture}, which keeps a recurrent state of each request: what it has made of "
            "a wrong draft can't be taken back, so that such a model does not draft"
        )
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{called} has a vocabulary of {config.vocab_size} tokens, and the model one of {target.vocab_size}: it "
            "can't guess what the model says"
        )
    if config.max_position_embeddings < context:
        raise CheckpointError(
            f"{called} has a context of {config.max_position_embeddings} tokens, and {context} are served: set "
            f"{context_setting} to {config.max_position_embeddings} or less"
        )
    _check_tokens(called, checkpoint, of_target)
    return DraftModelFiles(checkpoint, config)


def _check_tokens(called: str, checkpoint: Checkpoint, of_target: Checkpoint) -> None:
    """Raises CheckpointError if both have a tokenizer, and a number stands for another text in one than in the
    other."""
    if not (checkpoint.has_tokenizer and of_target.has_tokenizer):
        return
    own, others = token_texts(checkpoint), token_texts(of_target)
    differing = sorted(number for number in own.keys() | others.keys() if own.get(number) != others.get(number))
    if differing:
        first = differing[0]
        raise CheckpointError(
            f"{called} has a vocabulary of its own: {len(differing)} of its tokens are not those of the model, the "
            f"first of them token {first}, which is {own.get(first)!r} there and {others.get(first)!r} in the model"
        )


def read_by_a_step(model: Decoder) -> int:
    """Numbers of its weights that a step reads. A row of an embedding is next to nothing, and of experts a token reads
    those that it chooses."""
    config = model.config
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return model.num_parameters - embedding - idle_in(model.weights.layers)
