"""What a program asks of a drafter with weights: a head that was trained for a model, or a model of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.models.decoder import Look


@dataclass(frozen=True, slots=True)
class DraftCache:
    """What a network keeps of rows, in their blocks. hidden: float32 [num_blocks * block_size, width], by KV slot, the
    hidden states that it reads; width is 0 where it reads none."""

    entries: KVCache
    hidden: NDArray[np.float32]


class DraftNetwork(Protocol):
    """Layers over the same rows and blocks as the model that they guess for. Serves one thread."""

    @property
    def weight_bytes(self) -> int:
        """What its tensors take, those that were made of others too."""

    @property
    def parameters(self) -> int:
        """Trained numbers of its own."""

    @property
    def step_share(self) -> float:
        """Of the weights that a launch of the target reads, as many as `step` does: what it takes, about, where weights
        are most of it."""

    def make_cache(self, num_blocks: int, block_size: int) -> DraftCache:
        """A zeroed cache; block 0 is the null block."""

    def looking(self, seen: dict[int, torch.Tensor]) -> Look | None:
        """What the target's forward is to be told, for `read`: puts the hidden states that the network reads into
        `seen`, float32 [T, hidden], by the number of layers that they come after. None: it reads none of these."""

    def read(self, hidden: torch.Tensor, seen: dict[int, torch.Tensor]) -> NDArray[np.float32]:
        """The hidden states that are kept, float32 [T, width]. hidden: the target's after its last norm. seen: see
        `looking`."""

    def fill(self, batch: ForwardBatch, hidden: NDArray[np.float32], cache: DraftCache) -> None:
        """Writes the entries of the batch's tokens. hidden: float32 [T, width], of the positions before them."""

    def step(
        self, batch: ForwardBatch, hidden: NDArray[np.float32], cache: DraftCache
    ) -> tuple[NDArray[np.float32], torch.Tensor]:
        """The same, and what follows: the hidden states that the network expects of the batch's tokens, float32 [T,
        width], and the logits of the tokens behind them, float32 [T, vocab] of the target."""
