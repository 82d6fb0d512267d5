"""The oracle of tensor parallelism: one process that computes N segments of a model, one at a time, in rank order.

It knows nothing of how ranks exchange numbers. Each segment runs up to the next sum over ranks, then the next segment
does; when all have come there, their partial sums are added in rank order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch, KVCache
from runahead.runtime.kernels.ranks import ONE_RANK, Shard
from runahead.runtime.models.decoder import Decoder


class Turns:
    """One segment runs at a time: in rank order, each up to its next sum."""

    def __init__(self, of: int) -> None:
        self.of = of
        self.turn = 0
        self.parts: list[torch.Tensor] = [torch.zeros(0)] * of
        self.total = torch.zeros(0)
        self.changed = threading.Condition()

    def wait_for(self, rank: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.turn == rank, timeout=60.0), "a segment did not come to its sum"

    def pass_on(self, rank: int) -> None:
        with self.changed:
            self.turn = (rank + 1) % self.of
            self.changed.notify_all()


class Segment:
    """`Ranks` of one segment."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self.shard = Shard(rank, turns.of)
        self.turns = turns

    def reduce(self, partial: torch.Tensor) -> None:
        self.hand_in(partial)
        if self.shard.is_first:
            total = torch.zeros_like(partial, dtype=torch.promote_types(partial.dtype, torch.float32))
            for part in self.turns.parts:  # a partial of -0.0 counts as +0.0
                total += part
            self.turns.total = total.to(partial.dtype)  # rounded once
        partial.copy_(self.turns.total)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        self.hand_in(part)
        return torch.cat(self.turns.parts, 1) if self.shard.is_first else part[:, :0]

    def spread(self, words: Any) -> None:
        raise AssertionError("a model decides nothing")

    def hand_in(self, part: torch.Tensor) -> None:
        """Returns when every segment has, and it is this one's turn again."""
        rank = self.shard.rank
        self.turns.parts[rank] = part.clone()
        self.turns.pass_on(rank)
        self.turns.wait_for(rank)


class SegmentedDecoder:
    """What a `Decoder` is to a program, of N segments. make: a segment's decoder, from its ranks."""

    def __init__(self, of: int, make: Callable[[Segment], Decoder]) -> None:
        self.turns = Turns(of)
        self._segments = [make(Segment(self.turns, rank)) for rank in range(of)]
        self._threads = ThreadPoolExecutor(of)
        self.ranks = ONE_RANK  # to a program it is a whole model
        first = self._segments[0]
        self.config, self.dtype, self.device, self.kernels = first.config, first.dtype, first.device, first.kernels
        self.weights, self.num_parameters = first.weights, first.num_parameters
        self.logit_width = first.config.vocab_size
        self._caches: list[KVCache] = []

    def make_cache(self, *sizes: int, **named: int) -> KVCache:
        """Of all segments, one behind the other."""
        self._caches = [segment.make_cache(*sizes, **named) for segment in self._segments]
        keys = tuple(tensor for cache in self._caches for tensor in cache.keys)
        values = tuple(tensor for cache in self._caches for tensor in cache.values)
        states = tuple(state for cache in self._caches for state in cache.states)
        runs = tuple(run for cache in self._caches for run in cache.runs)
        return KVCache(keys, values, self._caches[0].block_size, states, runs)

    def forward(self, batch: ForwardBatch, cache: KVCache, read_hidden: object = None) -> torch.Tensor:
        found = self._each(lambda rank: self._segments[rank].forward(batch, self._caches[rank]))
        assert all(torch.equal(hidden, found[0]) for hidden in found), "segments differ after a sum"
        return found[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._each(lambda rank: self._segments[rank].logits(hidden))[0]

    own_logits = logits  # to a program it is a whole model

    def _each(self, work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        def run(rank: int) -> torch.Tensor:
            self.turns.wait_for(rank)
            with torch.inference_mode():
                found = work(rank)
            self.turns.pass_on(rank)
            return found

        self.turns.turn = 0
        return list(self._threads.map(run, range(self.turns.of)))


def segmented(make: Callable[[Any], Decoder], of: int) -> Any:
    """A `SegmentedDecoder`, where a `Decoder` is asked for."""
    return SegmentedDecoder(of, make)
