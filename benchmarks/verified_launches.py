"""What a launch that verifies drafts costs on this GPU beside a plain one: `python -m benchmarks.verified_launches`.

Bare graphs of greedy decode launches of a shape's random weights, in turns: one query token a row, and 1 + K of which
all are right. The head is zero, so that every token is 0, as the history before it: the drafter proposes K tokens each
time. Each line ends with what the drafter itself takes, with the kernel that makes the lines of F.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from benchmarks.gpu_table.shapes import SHAPES, Shape
from runahead.cuda_graphs.buckets import GraphKey, Piece
from runahead.cuda_graphs.cuda_device import allocate_mapped_rings
from runahead.cuda_graphs.graph_pool import GraphPool
from runahead.cuda_graphs.rings import STATUS_FAULT, RingLayout
from runahead.cuda_graphs.shape import Form, LaunchShape
from runahead.runtime.kernels.triton.kernel_set import TritonKernelSet
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.weights import dummy_weights
from runahead.runtime.plan import PLAN_WORDS, LaunchPlan, stage
from runahead.runtime.programs.triton import TritonProgram

LAUNCHES: Final = 48  # that are measured at a time, all staged before
PROMPT: Final = 512
CONTEXT: Final = 1024
BLOCK_SIZE: Final = 16
GOALS: Final = {1: 1.10, 8: 1.15}  # of a launch that verifies four positions, by rows
_EACH: Final = CONTEXT // BLOCK_SIZE  # blocks of a row
_NO_APPENDS: Final = np.zeros((0, 3), np.int32)


class Bench:
    """A program of the shape, and graphs of its launches with K drafts and with none."""

    def __init__(self, shape: Shape, most_rows: int, drafts: int, exact: bool) -> None:
        device = torch.device("cuda")
        config, kernels = shape.described(), TritonKernelSet(exact)
        weights = dummy_weights(config, torch.bfloat16, device, kernels.pack_weight, 0)
        weights = replace(weights, lm_head=torch.zeros_like(weights.lm_head))
        layout = RingLayout(LAUNCHES + 2, PLAN_WORDS, 1 << 12, most_rows, 4, drafts, most_rows * (1 + drafts))
        self.rings = allocate_mapped_rings(layout)
        self.program = TritonProgram(
            Decoder(config, weights, kernels, CONTEXT),
            self.rings,
            max_rows=most_rows,
            max_tokens=most_rows,
            num_blocks=most_rows * _EACH + 1,
            block_size=BLOCK_SIZE,
            context_length=CONTEXT,
            drafts=drafts,
            draft_rows=most_rows,
            exact=exact,
        )
        self._drafts = drafts
        self._stream = torch.cuda.Stream()
        self._graphs = GraphPool(self._stream)

    def capture(self, rows: int) -> None:
        for drafts in (0, self._drafts):
            shape = _shape(rows, drafts)
            with torch.cuda.stream(self._stream):
                self._whole(shape)  # compiles
            self._stream.synchronize()
            self._graphs.capture(_key(rows, drafts), lambda shape=shape: self._whole(shape))  # type: ignore[misc]

    def _whole(self, shape: LaunchShape) -> None:
        self.program.sample(shape)
        self.program.apply(shape)
        self.program.forward(shape)

    def step_ms(self, rows: int, drafts: int) -> float:
        """Of a launch, the mean of LAUNCHES. Raises RuntimeError if a token was not kept, or a plan not found."""
        self._begin(rows, drafts)
        key = _key(rows, drafts)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            self._graphs.replay(key)  # S has nothing to sample yet
            begin.record()
            for _ in range(LAUNCHES):
                self._graphs.replay(key)
            end.record()
        self._stream.synchronize()
        state = self.program.rows.state
        lengths = set(state.seq_len[:rows].tolist())
        if self.rings.status[:, STATUS_FAULT].any() or lengths != {PROMPT + LAUNCHES * (1 + drafts)}:
            raise RuntimeError(f"{rows} rows, {drafts} drafts: lengths of {lengths} after {LAUNCHES} launches")
        return begin.elapsed_time(end) / LAUNCHES

    def drafter_us(self, rows: int) -> float:
        """Of the drafter and the lines of F, in the state that the launches have left."""
        rows_of_program, times = self.program.rows, 50
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph = torch.cuda.CUDAGraph()

        def propose() -> None:
            rows_of_program.draft(rows, self._drafts)

        with torch.cuda.stream(self._stream):
            propose()
        self._stream.synchronize()
        with torch.cuda.graph(graph, stream=self._stream):
            for _ in range(times):
                propose()
        with torch.cuda.stream(self._stream):
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
        self._stream.synchronize()
        return begin.elapsed_time(end) / times * 1e3

    def _begin(self, rows: int, drafts: int) -> None:
        """Rows of PROMPT tokens, all of them 0, and a plan for every launch."""
        program, slots = self.program, torch.arange(rows, device="cuda")
        program.reset(0)
        self.rings.status[:] = 0  # captures have found no plan
        state = program.rows.state
        state.alive[:rows] = True
        state.seq_len[:rows] = PROMPT
        state.max_position[:rows] = CONTEXT - 1
        state.state_slot[:rows] = slots
        program.rows.places.lengths[:rows] = PROMPT - 1  # of models with states: nothing is replayed before the first
        state.block_table[:rows] = 1 + slots[:, None] * _EACH + torch.arange(_EACH, device="cuda")
        first = LaunchPlan(
            0, np.arange(rows, dtype=np.int32), np.ones(rows, np.bool_), True, _NO_APPENDS, tokens=rows * (1 + drafts),
            is_decode=True, drafts=drafts,
        )  # fmt: skip
        for number in range(1, LAUNCHES + 2):
            plan = first._replace(
                number=number, row_list_changed=number == 1, sample_rows=0 if number == 1 else rows,
                sample_drafts=0 if number == 1 else drafts,
            )  # fmt: skip
            slot = self.rings.slot(number)
            stage(plan, self.rings.plan[slot], self.rings.bulk[slot])
        torch.cuda.synchronize()


def _shape(rows: int, drafts: int) -> LaunchShape:
    return LaunchShape(0, rows, Form.PLAIN, rows, rows * (1 + drafts), True, drafts=drafts, sample_drafts=drafts)


def _key(rows: int, drafts: int) -> GraphKey:
    return GraphKey(Piece.LAUNCH, rows, Form.PLAIN, drafts)


def measure(bench: Bench, name: str, rows: int, drafts: int, rounds: int, say: Callable[[str], None]) -> None:
    bench.capture(rows)
    pairs = [(bench.step_ms(rows, 0), bench.step_ms(rows, drafts)) for _ in range(rounds)]
    plain, verified = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio, goal = verified / plain, GOALS.get(rows) if drafts == 3 else None
    verdict = "" if goal is None else f" (goal {goal:g}: {'met' if ratio <= goal else 'MISSED'})"
    say(
        f"{name}, {rows} rows: {plain:.4f} ms plain, {verified:.4f} ms with {drafts} drafts, ratio {ratio:.3f}{verdict}"
        f"; drafter {bench.drafter_us(rows):.1f} us"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="0.6B,8B", help="shapes of the benchmarks")
    parser.add_argument("--rows", default="1,8,64", help="of a launch, ascending")
    parser.add_argument("--drafts", type=int, default=3, help="of a row, 1 to 7 (3)")
    parser.add_argument("--rounds", type=int, default=5, help="both ways (5)")
    parser.add_argument("--exact", action="store_true", help="by the exact kernels")
    chosen = parser.parse_args(arguments)
    numbers = [int(rows) for rows in chosen.rows.split(",")]
    for name in chosen.models.split(","):
        with torch.inference_mode():
            bench = Bench(SHAPES[name], max(numbers), chosen.drafts, chosen.exact)
            for rows in numbers:
                measure(bench, name, rows, chosen.drafts, chosen.rounds, lambda line: print(line, flush=True))
        del bench
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
