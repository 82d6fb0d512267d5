"""What a step of a drafter with layers takes, beside the time in which its matrices are read: bare graphs.

A head as wide as the shape, or a smaller model, with random weights: K steps in turn, as apply has them, of rows of
some length; and what F does for it, one query token of each row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu_table.draft_launches import (
    BLOCK_SIZE,
    DRAFTS,
    context_of,
    free_memory,
    hold,
    program_of,
    random_model,
    rings_for,
    took_us,
)
from benchmarks.gpu_table.floors import BANDWIDTH, step_bytes
from benchmarks.gpu_table.heads import heads_like
from benchmarks.gpu_table.heads import step_bytes as bytes_of_head
from benchmarks.gpu_table.shapes import Shape
from runahead.runtime.models.decoder import Decoder

if TYPE_CHECKING:
    from runahead.runtime.programs.triton_head import GpuDraftNetwork


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter, and the bytes of the matrices that a step of it reads, whatever the number of rows."""

    network: GpuDraftNetwork
    bytes_: int

    @property
    def floor_us(self) -> float:
        return self.bytes_ / BANDWIDTH * 1e6


@dataclass(frozen=True, slots=True)
class DrafterBench:
    """A model and what drafts for it, by name. context: tokens of each row."""

    model: Decoder
    drafters: Mapping[str, Drafting]
    context: int
    longest: int
    exact: bool

    def took(self, drafter: str, rows: int) -> tuple[float, float]:
        """Microseconds of a step, and of what F does for the drafter."""
        device, length = self.model.device, self.context
        rings = rings_for(rows, 4, device)
        program = program_of(self.model, rings, self.longest, self.exact, self.drafters[drafter].network)
        hold(program, rows, length, self.longest)
        device_rows, follower = program.rows, program._head
        assert device_rows.guess is not None and follower is not None
        device_rows.rows.slots[:rows] = torch.arange(rows, dtype=torch.int32, device=device)
        batch = device_rows.batch(rows, rows, True)
        batch.positions.fill_(length - 1)
        batch.seq_lens.fill_(length)
        batch.block_tables.copy_(device_rows.state.block_table[:rows, : batch.block_tables.shape[1]])
        last = batch.block_tables[:, (length - 1) // BLOCK_SIZE].long() * BLOCK_SIZE
        batch.slot_mapping.copy_(last + (length - 1) % BLOCK_SIZE)
        hidden = torch.randn((rows, self.model.config.hidden_size), device=device, dtype=self.model.dtype)
        _, seen = follower.looking(rows)
        if seen is not None:
            seen.normal_()
        step = took_us(device, lambda: device_rows.guess(rows, DRAFTS))  # type: ignore[misc]
        return step / DRAFTS, took_us(device, lambda: follower.follow(batch, hidden, seen))


@contextlib.contextmanager
def opened_drafters(shape: Shape, smaller: Shape | None, device: torch.device, exact: bool) -> Iterator[DrafterBench]:
    """Load a model of the shape, heads for it, and the smaller model, all of random weights; and give their memory back
    afterwards."""
    try:
        with torch.inference_mode():
            longest = context_of(shape.workload)
            model = random_model(shape, device, exact, longest)
            drafters = _heads(model, longest, exact)
            if smaller is not None:
                drafters[called(smaller)] = _model(smaller, model, longest, exact)
            yield DrafterBench(model, drafters, shape.workload.prompt, longest, exact)
    finally:
        free_memory(device)


def called(smaller: Shape) -> str:
    """A smaller model that drafts, in the table."""
    return f"model {smaller.name}"


def _heads(model: Decoder, longest: int, exact: bool) -> dict[str, Drafting]:
    from runahead.runtime.programs.triton_head import TritonHead

    def matrix(outputs: int, depth: int) -> torch.Tensor:
        return torch.randn((outputs, depth), device=model.device, dtype=model.dtype) * 0.02

    return {
        kind: Drafting(TritonHead(head, model, exact, longest), bytes_of_head(head, model))
        for kind, head in heads_like(model, matrix).items()
    }


def _model(smaller: Shape, target: Decoder, longest: int, exact: bool) -> Drafting:
    from runahead.runtime.programs.triton_draft_model import TritonDraftModel

    own = random_model(smaller, target.device, exact, longest)
    return Drafting(TritonDraftModel(own, target), step_bytes(own.config, own.dtype).weights)
