"""Finds how products of decode launches are best cut on this GPU: `python -m benchmarks.tune.products`.

Candidates are drawn at random from all sensible ones, and timed in a captured graph that goes through several copies of
the weights, more than the cache holds. The best goes into `measured_tilings.json` beside the kernels, under the GPU's
name; what stands there of other products stays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.nn import functional

from benchmarks.tune.trial import READ_BYTES_PER_S, compile_side_by_side, graph_us, part_of
from runahead.runtime.kernels.layers import Linear, Norm
from runahead.runtime.kernels.triton.row_product import ADD, EPILOGUES, GATED, STORE, row_product
from runahead.runtime.kernels.triton.rows_product import Residual, SplitScratch, columns_of, rows_product
from runahead.runtime.kernels.triton.tilings import SPLIT_WORDS, TABLE, RowTiling, Tiling, tiling_key
from runahead.runtime.rounding import ceil_div

_GRAPH_BYTES: Final = 4e8  # of weights that a graph goes through
_SHARED: Final = 227 * 1024  # bytes of shared memory that a program may have
_PROCESSORS: Final = 132
_HEAD: Final = 100_000  # outputs from here on: a head
_MOST_TILES: Final = 1024


class Product(NamedTuple):
    """outputs: rows of the weights. normed: a norm comes before it."""

    outputs: int
    depth: int
    epilogue: int
    normed: bool


PRODUCTS: Final = {
    "0.6B": (
        Product(4096, 1024, STORE, True),
        Product(1024, 2048, ADD, False),
        Product(6144, 1024, GATED, True),
        Product(1024, 3072, ADD, False),
        Product(151936, 1024, STORE, False),
    ),
    "1B": (
        Product(3072, 2048, STORE, True),
        Product(2048, 2048, ADD, False),
        Product(16384, 2048, GATED, True),
        Product(2048, 8192, ADD, False),
        Product(128256, 2048, STORE, False),
    ),
    "8B": (
        Product(6144, 4096, STORE, True),
        Product(4096, 4096, ADD, False),
        Product(28672, 4096, GATED, True),
        Product(4096, 14336, ADD, False),
        Product(128256, 4096, STORE, False),
    ),
}
AnyTiling: TypeAlias = Tiling | RowTiling


def rows_candidates(product: Product, columns: int) -> Iterator[Tiling]:
    """Of a few rows: what the matrix units take, fits into shared memory, and keeps the memory busy."""
    outputs, depth, epilogue, _ = product
    halves = 2 if epilogue == GATED else 1
    for tile, block, splits, stages, warps, held in itertools.product(
        (16, 32, 64, 128), (64, 128, 256, 512), (1, 2, 3, 4, 6, 7, 8), (1, 3, 4, 5, 6), (4, 8), (False, True)
    ):
        if depth % (splits * block) or tile // halves < 8 or (outputs * splits * columns > SPLIT_WORDS and splits > 1):
            continue
        in_loop = depth // splits // block - held
        if (in_loop == 0) != (stages == 1) or (in_loop and (stages > in_loop + 1 or block == 512)):
            continue
        programs = ceil_div(outputs, tile) * splits
        if outputs >= _HEAD and (splits > 1 or tile < 64 or held):
            continue
        if outputs < _HEAD and not 60 <= programs <= (600 if splits > 1 else 1100):
            continue
        if (warps == 8 and tile < 64) or (tile == 16 and (columns > 16 or block < 128)):
            continue
        if held and tile * block * 2 > 32 * warps * 128 * 4:
            continue
        shared = (tile + columns) * block * 2 * (stages if in_loop else 1)
        if shared > _SHARED or min(programs / _PROCESSORS, max(_SHARED // shared, 1)) * shared < 20 * 1024:
            continue
        yield Tiling(tile // halves, block, splits, stages, warps, held)


def row_candidates(product: Product) -> Iterator[RowTiling]:
    """Of one row: enough programs, and what they hold fits into registers."""
    outputs, depth, epilogue, _ = product
    halves = 2 if epilogue == GATED else 1
    for tile, block, held, warps in itertools.product((2, 4, 8, 16), (512, 1024, 2048), (1, 2, 3, 4), (4, 8)):
        chunks = ceil_div(depth, block)
        if depth % block or held > chunks or tile < halves or held < min(chunks, 2):
            continue
        registers, lanes = tile * block * held / 2 / (32 * warps), tile * block / (32 * warps)
        if 8 <= registers <= 80 and outputs / tile >= 100 and lanes >= 8:
            yield RowTiling(tile // halves, block, held, warps)


@dataclass
class Bench:
    """One product for a number of rows, with weights that it goes through by turns."""

    product: Product
    rows: int
    copies: int
    weights: list[Linear] = field(init=False)

    def __post_init__(self) -> None:
        outputs, depth, epilogue, _ = self.product
        width = outputs // 2 if epilogue == GATED else outputs

        def random_tensor(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.weights = [Linear(random_tensor(outputs, depth) * depth**-0.5, None) for _ in range(self.copies)]
        self.x = random_tensor(self.rows, depth)
        self.out = torch.zeros(
            self.rows, width, device="cuda", dtype=torch.float32 if outputs >= _HEAD else torch.bfloat16
        )
        self.norm = Norm(random_tensor(max(depth, width)), 1e-5)
        squares = torch.ones(_MOST_TILES, columns_of(self.rows), dtype=torch.float64, device="cuda")
        self.residual = Residual(self.out, torch.empty_like(self.out), squares)
        self.scratch = SplitScratch(
            torch.zeros(SPLIT_WORDS, device="cuda"), torch.zeros(_MOST_TILES, dtype=torch.int32, device="cuda")
        )

    def run(self, tiling: AnyTiling) -> None:
        _, depth, epilogue, normed = self.product
        squares = (self.residual.squares, max(1, min(64, depth // 64)), 1e-5) if normed else None
        for weight in self.weights:
            if isinstance(tiling, RowTiling):
                row_product(self.x, weight, self.norm if normed else None, self.out, epilogue, tiling)
            elif epilogue == ADD:
                rows_product(
                    self.x, weight, self.out, ADD, tiling, self.scratch, self.rows, norm=self.norm,
                    residual=self.residual,
                )  # fmt: skip
            else:
                rows_product(self.x, weight, self.out, epilogue, tiling, self.scratch, self.rows, squares=squares)

    def vendor(self) -> None:
        for weight in self.weights:
            functional.linear(self.x, weight.weight)


class Job(NamedTuple):
    product: Product
    rows: int
    candidates: list[AnyTiling]


def jobs(names: list[str], batches: list[int], limit: int) -> Iterator[Job]:
    """limit: candidates of a product, each launched programmatically and not."""
    for name, rows in itertools.product(names, batches):
        for product in PRODUCTS[name]:
            found: list[AnyTiling] = []
            found += row_candidates(product) if rows == 1 else rows_candidates(product, columns_of(rows))
            random.Random(rows).shuffle(found)
            both = [replace(tiling, dependent=dependent) for tiling in found[:limit] for dependent in (True, False)]
            yield Job(product, rows, both)


def measured(job: Job) -> tuple[str, AnyTiling | None]:
    """The product's key in the table and the best candidate. Prints the best ones beside the floor and the vendor's
    product."""
    outputs, depth, epilogue, _ = job.product
    bench = Bench(job.product, job.rows, max(2, int(_GRAPH_BYTES / (2 * outputs * depth))))
    found: list[tuple[float, AnyTiling]] = []
    for tiling in job.candidates:
        best = min((took for took, _ in found), default=float("inf"))
        try:
            found.append((graph_us(partial(bench.run, tiling), best * bench.copies * 1.15) / bench.copies, tiling))
        except Exception as error:  # a candidate that this GPU can't hold
            print("  ", tiling, str(error)[:80].replace("\n", " "))
    found.sort(key=lambda one: one[0])
    key = tiling_key(outputs, depth, 1 if job.rows == 1 else columns_of(job.rows), EPILOGUES[epilogue])
    vendor, floor = graph_us(bench.vendor) / bench.copies, 2 * outputs * depth / READ_BYTES_PER_S * 1e6
    shown = (f"{took:.2f} {'/'.join(str(value) for value in asdict(tiling).values())}" for took, tiling in found[:4])
    print(f"{key}: floor {floor:.2f} vendor {vendor:.2f} µs | {' | '.join(shown)}", flush=True)
    return key, found[0][1] if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(PRODUCTS))
    parser.add_argument("--rows", default="1,8,16,32,64")
    parser.add_argument("--limit", type=int, default=30, help="candidates of a product")
    parser.add_argument("--seconds", type=float, default=400, help="no product is begun after so many")
    parser.add_argument("--out", type=Path, default=TABLE)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    began = time.monotonic()
    work = list(jobs(chosen.models.split(","), [int(rows) for rows in chosen.rows.split(",")], chosen.limit))
    if chosen.compile is not None:
        each = [(job, tiling) for job in work for tiling in job.candidates]
        for job, tiling in each[part_of(chosen.compile)]:
            try:
                Bench(job.product, job.rows, 1).run(tiling)
            except Exception as error:
                print("  ", tiling, str(error)[:80].replace("\n", " "))
        return
    flags = ["--models", chosen.models, "--rows", chosen.rows, "--limit", str(chosen.limit)]
    compile_side_by_side("benchmarks.tune.products", flags)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    table: dict[str, dict[str, Any]] = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    mine = table.setdefault(torch.cuda.get_device_name(), {})
    for job in work:
        if time.monotonic() - began > chosen.seconds:
            print("the time is up")
            break
        key, best = measured(job)
        if best is not None:
            mine[key] = asdict(best)
        torch.cuda.empty_cache()
    chosen.out.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
