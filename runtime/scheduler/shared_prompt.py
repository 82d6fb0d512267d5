"""A prompt with several completions: the first one computes it, and the others share the KV blocks that it fills.

The others join the queue when these blocks can be found. A completion that shares them computes the prompt's last
tokens again, since their logits are wanted. It finds the blocks in the prefix cache, and of a model with recurrent
states the state behind them. Where the prefix cache is off, the blocks have a salt that only these completions know,
and are forgotten when each of them has had a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from runahead.runtime.wire.parameters import SamplingParams

if TYPE_CHECKING:
    from runahead.runtime.scheduler.request import Request

_SEEDS = 1 << 64


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """blocks: full blocks of the prompt that are shared. is_ready: they can be found, or the first completion has
    ended. not_begun: completions that have not had a row and have not ended."""

    first: Request
    blocks: int
    is_ready: bool = False
    not_begun: set[Request] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """A completion may still look for the blocks."""
        return bool(self.not_begun)

    def holds_back(self, request: Request) -> bool:
        """The request is not to be admitted yet."""
        return request is not self.first and not self.is_ready

    def found(self, request: Request, blocks: int) -> bool:
        """So many blocks of this completion, its first ones, can be found. Whether the prompt is ready by that."""
        return self._is_ready_by(request is self.first and blocks >= self.blocks)

    def has_ended(self, request: Request) -> bool:
        """A completion has ended. Nobody waits for one that is gone. Whether the prompt is ready by that."""
        self.not_begun.discard(request)
        return self._is_ready_by(request is self.first)

    def _is_ready_by(self, event: bool) -> bool:
        before, self.is_ready = self.is_ready, self.is_ready or event
        return self.is_ready and not before


def share(requests: Sequence[Request], blocks: int) -> None:
    """These completions of one prompt share its first blocks."""
    prompt = SharedPrompt(requests[0], blocks, not_begun=set(requests))
    for request in requests:
        request.shared_prompt = prompt


def sampling_of(sampling: SamplingParams, index: int) -> SamplingParams:
    """Of completion `index`, where completion 0 has `sampling`: another seed, and nothing is said of the prompt."""
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) % _SEEDS, prompt_logprobs=-1)
