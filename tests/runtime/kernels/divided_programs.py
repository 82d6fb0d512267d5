"""Two ranks' programs in one process: each computes its segment of the model up to the next exchange, then the next one
does. What they exchange goes through this process. To be imported where Triton's kernels can be.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from runahead.cuda_graphs.device import LaunchShape
from runahead.cuda_graphs.rings import RingMemory
from runahead.runtime.kernels.layers import Norm
from runahead.runtime.kernels.triton.gemm.separate_epilogue import add_scaled
from runahead.runtime.programs.cuda.program import TritonProgram
from tests.runtime.launches import over_program
from tests.runtime.ranks.segments import Segment, Turns


class GpuSegment(Segment):
    """`GpuRanks` of one segment."""

    def reduce_add(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor,
        following: torch.Tensor,
        scaled: torch.Tensor,
        squares: torch.Tensor,
    ) -> int:
        self.reduce(partial)
        add_scaled(partial, None, residual, Norm(following, 0.0), scaled, squares)
        return 1

    def gather_rows(self, part: torch.Tensor, indexes: torch.Tensor | None) -> torch.Tensor:
        return self.gather(part if indexes is None else part[indexes.long()])

    def best(self, scores: torch.Tensor, tokens: torch.Tensor, rows: int) -> None:
        own = scores.shape[1] - (self.shard.of - 1)
        highest = scores[:rows, :own].amax(1, keepdim=True)
        chosen = tokens[:rows, :own].where(scores[:rows, :own] == highest, 0x7FFFFFFF).amin(1, keepdim=True)
        for column, mine in ((scores, highest), (tokens, chosen)):
            self.hand_in(mine)
            if self.shard.is_first:
                self.turns.total = torch.cat(self.turns.parts, 1)
            peers = [rank for rank in range(self.shard.of) if rank != self.shard.rank]
            column[:rows, own:] = self.turns.total[:, peers]

    def spread(self, words: Any) -> None:
        self.hand_in(words)
        if self.shard.is_first:
            self.turns.total = words.clone()
        words.copy_(self.turns.total)


class Divided:
    """Programs of all ranks, in step. make: a rank's program, from its exchange and its rings. rings: of
    each rank, which have the same plans."""

    def __init__(
        self, rings: list[RingMemory], make: Callable[[GpuSegment, RingMemory], TritonProgram], *, is_on_gpu: bool
    ) -> None:
        self.rings = rings[0]
        self._is_on_gpu = is_on_gpu
        self.turns = Turns(len(rings))
        self.programs = [make(GpuSegment(self.turns, rank), own) for rank, own in enumerate(rings)]

    def run(self, shape: LaunchShape) -> None:
        with ThreadPoolExecutor(len(self.programs)) as threads:
            work = [threads.submit(self._run, rank, shape) for rank in range(len(self.programs))]
            failed = [error for done in work if (error := done.exception()) is not None]
            for error in sorted(failed, key=lambda error: isinstance(error, AssertionError)):
                raise error  # rather than that another waits for it

    @torch.inference_mode()
    def _run(self, rank: int, shape: LaunchShape) -> None:
        self.turns.wait_for(rank)
        over_program(self.programs[rank])(shape)
        if self._is_on_gpu:
            torch.cuda.synchronize()
        self.turns.pass_on(rank)
