"""Times ways to cut the products of experts on the GPU at hand, each by itself, and prints the best.

`python -m benchmarks.tune.experts`. A layer of the shape with random weights, rows that choose at random; its weights
are more than the GPU's caches hold. What is asked for besides: a lone row's kernels, routing and the sum.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from typing import Final

import torch

from benchmarks.tune.trial import READ_BYTES_PER_S, compile_side_by_side, graph_us, part_of
from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.layers import Norm
from runahead.runtime.kernels.triton.dependent_launch import dependent_launch_works
from runahead.runtime.kernels.triton.expert_products import expert_product, expert_sums
from runahead.runtime.kernels.triton.expert_row import experts_of_one_row
from runahead.runtime.kernels.triton.expert_tilings import (
    FIRST_GATED,
    LAST,
    ExpertProduct,
    ExpertRowTiling,
    ExpertTiling,
    expert_row_tiling,
    expert_tiling,
)
from runahead.runtime.kernels.triton.gpu import LEAST_SHARED_MEMORY, current_gpu
from runahead.runtime.kernels.triton.routing import Routing, route, warps_for

SHAPES: Final = {
    "30B-A3B": (2048, 128, 768, 8),
    "7B-A1B": (1536, 64, 512, 6),
    "40B-A3B-delta": (2048, 512, 512, 10),
}  # hidden, experts, their width, experts of a token
_ROUTINGS: Final[Sequence[int]] = (1, 2, 4, 8)  # warps of a token's program
_LAYERS: Final = 2  # by turns, so that a lone row's experts are not in the caches


def tilings(product: ExpertProduct, columns: int) -> Iterator[ExpertTiling]:
    """Candidates. columns: entries of an item."""
    gpu = current_gpu()
    memory = LEAST_SHARED_MEMORY if gpu is None else gpu.shared_memory
    few = columns <= 16
    tiles, blocks, warps = ((32, 64, 128), (64, 128, 256), (4,)) if few else ((64, 128), (64, 128), (4, 8))
    for tile, block, stages, some in itertools.product(tiles, blocks, (2, 3, 4, 6), warps):
        taken = (tile + columns) * block * 2 * stages
        if product.depth % block == 0 and 32 << 10 <= taken <= min(memory, 128 << 10):
            yield ExpertTiling(tile // product.halves, block, stages, some)


def row_tilings() -> Iterator[ExpertRowTiling]:
    """Candidates for either kernel of a lone row."""
    for rows, weights, warps in itertools.product((1, 2, 4, 8, 16, 32), (2048, 4096, 8192, 16384), (1, 2, 4, 8)):
        if 16 <= weights // (warps * 32) <= 128:  # numbers of a thread
            yield ExpertRowTiling(rows, weights, warps)


class Bench:
    """Layers of experts by turns, for so many rows."""

    def __init__(self, name: str, rows: int) -> None:
        hidden, count, width, chosen = SHAPES[name]
        self.rows, self.chosen, self.dependent = rows, chosen, dependent_launch_works()
        self.choice = Choice(chosen, renormalised=True)
        self.gates = ExpertProduct(FIRST_GATED, chosen, count, width, hidden, torch.bfloat16.itemsize)
        self.downs = ExpertProduct(LAST, chosen, count, hidden, width, torch.bfloat16.itemsize)

        def weights(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, device="cuda", dtype=torch.bfloat16).mul_(sizes[-1] ** -0.5)

        self.gate_up = [weights(count, 2 * width, hidden) for _ in range(_LAYERS)]
        self.down = [weights(count, hidden, width) for _ in range(_LAYERS)]
        self.norm = Norm(weights(hidden), 1e-6)
        self.x, self.gated = weights(rows, hidden), weights(rows * chosen, width)
        self.results = torch.randn(rows * chosen, hidden, device="cuda")
        self.squares = torch.ones(hidden // 16, max(rows, 8), dtype=torch.float64, device="cuda")
        self.live = torch.ones(rows, dtype=torch.int32, device="cuda")
        self.arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
        draw = torch.Generator("cuda").manual_seed(1)
        self.scores = torch.randn(rows, count, generator=draw, device="cuda")
        self.routed = self.route()

    def route(self, warps: int | None = None) -> Routing:
        squares = self.squares, 32, 1e-6
        return route(
            self.scores, self.live, self.choice, self.arrived, squares=squares, depth=self.x.shape[1],
            dependent=self.dependent, warps=warps,
        )  # fmt: skip

    @property
    def named(self) -> int:
        """Experts that the rows name."""
        items = self.routed.items
        return int(((items[:, 1] == 0) & (items[:, 2] > 0)).sum())

    def product(self, gates: bool, tiling: ExpertTiling) -> None:
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            x, weight, out = (self.x, gate_up, self.gated) if gates else (self.gated, down, self.results)
            expert_product(
                x, weight, self.routed, self.chosen, out, FIRST_GATED if gates else LAST, scaled=gates, tiling=tiling,
                dependent=self.dependent,
            )  # fmt: skip

    def sums(self) -> None:
        expert_sums(
            self.results, self.live, self.chosen, self.x, added=True, gamma=self.norm.weight,
            scaled=torch.empty_like(self.x), squares=self.squares, dependent=self.dependent,
        )  # fmt: skip

    def lone_row(self, gates: ExpertRowTiling | None = None, downs: ExpertRowTiling | None = None) -> None:
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            experts_of_one_row(
                self.x, self.scores, self.live, self.norm, gate_up, down, self.choice, dependent=self.dependent,
                gates=gates, downs=downs,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="30B-A3B")
    parser.add_argument("--rows", default="1,8,64,512,2048")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.compile is None:
        compile_side_by_side("benchmarks.tune.experts", [f"--shape={chosen.shape}", f"--rows={chosen.rows}"])
    for rows in map(int, chosen.rows.split(",")):
        bench = Bench(chosen.shape, rows)
        if chosen.compile is None:
            print(f"{chosen.shape}, {rows} rows name {bench.named} experts", flush=True)
            for warps in _ROUTINGS:
                is_default = " (the default)" if warps == warps_for(bench.scores.shape[1]) else ""
                _print(f"routing by {warps} warps{is_default}", partial(bench.route, warps), 1, 0)
            _print("sum", bench.sums, 1, 0)
        else:
            for warps in _ROUTINGS[part_of(chosen.compile)]:
                bench.route(warps)
        if rows == 1:
            hidden, _, width, _ = SHAPES[chosen.shape]
            floor = bench.named * 3 * width * hidden * 2 / READ_BYTES_PER_S * 1e6
            _lone_row(bench, part_of(chosen.compile), None if chosen.compile is not None else floor)
        for product in (bench.gates, bench.downs):
            gates = product is bench.gates
            usual = expert_tiling(product, rows, bench.routed.block)
            tried = list(tilings(product, bench.routed.block))[part_of(chosen.compile)]
            found = sorted((_us(bench, gates, tiling), str(tiling)) for tiling in {usual, *tried})
            if chosen.compile is None:
                read = bench.named * product.outputs * product.halves * product.depth * product.itemsize
                floor = read / READ_BYTES_PER_S * 1e6
                print(f"  {'gates and ups' if gates else 'downs'}: floor {floor:.1f} µs; until now {usual}")
                for took, tiling in found[:5] + [one for one in found[5:] if one[1] == str(usual)]:
                    print(f"    {took:.1f} {tiling}", flush=True)


def _lone_row(bench: Bench, part: slice, floor_us: float | None) -> None:
    """Either kernel's candidates beside what the other is cut like until now. floor_us: None prints nothing."""
    for which, product in (("gates", bench.gates), ("downs", bench.downs)):
        usual = expert_row_tiling(product)
        tried = [ExpertRowTiling(*one) for one in sorted({astuple(one) for one in (usual, *row_tilings())})]
        found = []
        for tiling in tried[part]:
            found.append((_graph_us(partial(bench.lone_row, **{which: tiling}), tiling) / _LAYERS, str(tiling)))
        if floor_us is not None:
            print(f"  a lone row's {which}: floor of both {floor_us:.1f} µs")
            for took, name in [*sorted(found)[:5], *(one for one in found if one[1] == str(usual))]:
                print(f"    {took:.1f} {name}", flush=True)


def _us(bench: Bench, gates: bool, tiling: ExpertTiling) -> float:
    """Of one product; infinite where this GPU can't hold it."""
    return _graph_us(lambda: bench.product(gates, tiling), tiling) / _LAYERS


def _graph_us(work: Callable[[], object], tiling: object) -> float:
    try:
        return graph_us(work)
    except Exception as error:  # by Triton, of several kinds
        print("   ", tiling, str(error)[:80].replace("\n", " "))
        return float("inf")


def _print(what: str, work: Callable[[], object], times: int, read: int) -> None:
    floor = f", floor {read / READ_BYTES_PER_S * 1e6:.1f}" if read else ""
    print(f"  {what}: {graph_us(work) / times:.1f} µs{floor}", flush=True)


if __name__ == "__main__":
    main()
