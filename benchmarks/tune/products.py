"""Finds how products of decode launches are best cut on this GPU: `python -m benchmarks.tune.products`.

Candidates are drawn at random from all sensible ones, and timed in a captured graph that goes through several copies of
the weights, more than the cache holds. The best goes into `measured_tilings.json` beside the kernels, under the GPU's
name; what stands there of other products stays.

With `--exact` the depth of a product is cut into as many parts for every number of rows: that number of parts is taken
with which the products of all numbers of rows lose least against the best of each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.nn import functional

from benchmarks.gpu_table.shapes import SHAPES
from benchmarks.tune.trial import READ_BYTES_PER_S, compile_side_by_side, graph_us, part_of
from runahead.runtime.kernels.layers import Linear, Norm
from runahead.runtime.kernels.triton.lanes_product import GRAIN, blocks_held
from runahead.runtime.kernels.triton.row_product import ADD, EPILOGUES, GATED, STORE, row_product
from runahead.runtime.kernels.triton.rows_product import Residual, SplitScratch, columns_of, rows_product
from runahead.runtime.kernels.triton.tiling_counts import LayerProduct, products_in
from runahead.runtime.kernels.triton.tilings import (
    SPLIT_WORDS,
    TABLE,
    RowTiling,
    Tiling,
    is_one_sum,
    measured_tiling,
    rows_in_table,
    tiling_key,
)
from runahead.runtime.models.weights import described
from runahead.runtime.rounding import ceil_div

GRAPH_BYTES: Final = 4e8  # of weights that a graph goes through
_SHARED: Final = 227 * 1024  # bytes of shared memory that a program may have
_PROCESSORS: Final = 132
_HEAD: Final = 100_000  # outputs from here on: a head
_MOST_TILES: Final = 1024
_FEW: Final = 64  # rows of the batch that a program takes
_LEAST_TILE: Final = 16  # outputs of a program on the matrix units
_TILES_OF_WARPS: Final = {1: (16, 32), 2: (32, 64), 4: (16, 32, 64, 128), 8: (64, 128)}  # outputs of a program
_BUSY: Final = 60  # programs, at least, where there can be so many


NAMES: Final = ("0.6B", "1B", "8B", "30B-A3B", "7B-A1B")


@cache
def products(name: str) -> tuple[LayerProduct, ...]:
    """Of a shape of the benchmarks: those of its layers, and the head. Experts' own have a tuner of their own."""
    model = described(SHAPES[name].described())
    outputs, depth = model.lm_head.shape
    return (*dict.fromkeys(products_in(model.layers)), LayerProduct(outputs, depth, STORE, normed=False))


AnyTiling: TypeAlias = Tiling | RowTiling


def rows_candidates(product: LayerProduct, columns: int) -> Iterator[Tiling]:
    """Of a few rows: what the matrix units take, fits into shared memory, and keeps the memory busy. From 32 rows on a
    program may have half of them, so that it reads less of them, and another reads its weights from the caches."""
    outputs, depth, epilogue, _ = product
    halves = 2 if epilogue == GATED else 1
    taken_of = (columns,) if columns < 32 else (columns, columns // 2)
    for tile, block, splits, stages, warps, held, taken in itertools.product(
        (16, 32, 64, 128),
        (64, 128, 256, 512),
        (1, 2, 3, 4, 6, 7, 8),
        (1, 2, 3, 4, 5, 6, 7, 10),
        (1, 2, 4, 8),
        (False, True),
        taken_of,
    ):
        if depth % (splits * block) or tile // halves < 8 or (outputs * splits * columns > SPLIT_WORDS and splits > 1):
            continue
        in_loop = depth // splits // block - held
        if (in_loop == 0) != (stages == 1) or (in_loop and (stages > in_loop + 1 or block == 512)):
            continue
        programs = ceil_div(outputs, tile) * splits * (columns // taken)
        if outputs >= _HEAD and (splits > 1 or tile < 64 or held or taken < columns):
            continue
        if outputs < _HEAD and not min(_BUSY, outputs // _LEAST_TILE) <= programs <= (600 if splits > 1 else 1100):
            continue
        if tile not in _TILES_OF_WARPS[warps] or (tile == 16 and (taken > 16 or block < 128)):
            continue
        if held and tile * block * 2 > 32 * warps * 128 * 4:
            continue
        shared = (tile + taken) * block * 2 * (stages if in_loop else 1)
        in_flight = min(programs / _PROCESSORS, max(_SHARED // shared, 1)) * shared  # bytes, of a processor
        if shared > _SHARED or (outputs >= _BUSY * _LEAST_TILE and in_flight < 20 * 1024):
            continue
        whole = Tiling(tile // halves, block, splits, stages, warps, held)
        yield whole if taken == columns else replace(whole, columns=taken)


def lanes_candidates(product: LayerProduct, columns: int) -> Iterator[Tiling]:
    """Of up to 16 rows, the warps of a program side by side along the depth: of each size a lane's whole part is asked
    for early where registers hold it, else two numbers of weights. There are programs for half of the processors, if
    there can be, and no lane has so little that its end takes longer."""
    outputs, depth, epilogue, _ = product
    halves = 2 if epilogue == GATED else 1
    for tile, lanes in itertools.product((16, 32, 64), (4, 8, 16)):
        if (
            depth % (lanes * GRAIN)
            or columns > 16
            or not min(_BUSY, outputs // _LEAST_TILE) <= outputs // tile <= 12000
        ):
            continue
        part = depth // lanes
        ways = {
            blocks_held(depth, lanes, block, tile) * block: block
            for block in (256, 128, 64, 32)  # of as much on its way the smallest blocks stay: more of them are
            if part % block == 0 and tile * block * blocks_held(depth, lanes, block, tile) <= 8192
        }
        in_flight = {part, 4096 // tile} if part in ways else {words // tile for words in (2048, 4096)}
        for entries in sorted(in_flight & ways.keys()):
            if part * tile >= 2048:
                yield Tiling(tile // halves, ways[entries], 1, 1, lanes, True, lanes=lanes)


def many_candidates(product: LayerProduct, columns: int) -> Iterator[Tiling]:
    """Of more rows than a program takes: what the matrix units take, and fits into registers and shared memory."""
    outputs, depth, epilogue, _ = product
    halves = 2 if epilogue == GATED else 1
    for tile, taken, block, splits, stages, warps, spread in itertools.product(
        (64, 128), (64, 128, 256), (64, 128), (1, 2, 3, 4, 6, 7, 8), (3, 4, 5), (4, 8), (False, True)
    ):
        groups = ceil_div(columns, taken)
        if depth % (splits * block) or taken > columns or not 32 <= tile * taken / (32 * warps) <= 128:
            continue
        if (spread and splits == 1) or (outputs >= _HEAD and splits > 1):
            continue
        if spread and outputs * groups * taken * splits > SPLIT_WORDS:
            continue
        programs = ceil_div(outputs, tile) * groups * (splits if spread else 1)
        if (tile + taken) * block * 2 * stages > _SHARED or stages > depth // splits // block or programs < 30:
            continue
        yield Tiling(tile // halves, block, splits, stages, warps, False, False, columns=taken, spread=spread)


def row_candidates(product: LayerProduct) -> Iterator[RowTiling]:
    """Of one row: enough programs, and what they hold fits into registers."""
    outputs, depth, epilogue, _ = product
    halves = 2 if epilogue == GATED else 1
    blocks, chunks_held = (256, 512, 1024, 2048), (1, 2, 3, 4, 6, 8, 12, 16)
    for tile, block, held, warps in itertools.product((2, 4, 8, 16), blocks, chunks_held, (2, 4, 8)):
        chunks = ceil_div(depth, block)
        if depth % block or held > chunks or tile < halves or held < min(chunks, 2):
            continue
        registers, lanes = tile * block * held / 2 / (32 * warps), tile * block / (32 * warps)
        if 8 <= registers <= 80 and outputs // tile >= min(100, outputs // 2) and lanes >= 8:
            yield RowTiling(tile // halves, block, held, warps)


@dataclass
class Bench:
    """One product for a number of rows, with weights that it goes through by turns."""

    product: LayerProduct
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
        # Logits are left where each row belongs.
        self.places = torch.arange(self.rows, dtype=torch.int32, device="cuda") if outputs >= _HEAD else None
        self.scratch = SplitScratch(
            torch.zeros(SPLIT_WORDS, device="cuda"), torch.zeros(_MOST_TILES, dtype=torch.int32, device="cuda")
        )

    def run(self, tiling: AnyTiling, tiles: int = 0) -> None:
        """tiles: of the sums of squares, if a norm comes before; 0: as tiles of 64 outputs leave them."""
        _, depth, epilogue, normed = self.product
        squares = (self.residual.squares, tiles or max(1, min(64, depth // 64)), 1e-5) if normed else None
        for weight in self.weights:
            if isinstance(tiling, RowTiling):
                norm = self.norm if normed else None
                row_product(self.x, weight, norm, self.out, epilogue, tiling, self.places)
            elif epilogue == ADD:
                rows_product(
                    self.x, weight, self.out, ADD, tiling, self.scratch, self.rows, norm=self.norm,
                    residual=self.residual,
                )  # fmt: skip
            else:
                rows_product(
                    self.x, weight, self.out, epilogue, tiling, self.scratch, self.rows, squares=squares,
                    places=self.places,
                )  # fmt: skip

    def vendor(self) -> None:
        for weight in self.weights:
            functional.linear(self.x, weight.weight)


class Job(NamedTuple):
    product: LayerProduct
    rows: int
    candidates: list[AnyTiling]


def jobs(names: list[str], batches: list[int], limit: int, exact: bool) -> Iterator[Job]:
    """limit: candidates of a product, each launched programmatically and not; exact: for every number of parts."""
    for product in dict.fromkeys(product for name in names for product in products(name)):
        for rows in batches:
            found: list[AnyTiling] = []
            if rows == 1 and not exact:
                found += row_candidates(product)
            else:
                columns = columns_of(rows)
                found += (rows_candidates if columns <= _FEW else many_candidates)(product, columns)
                found += [] if exact else lanes_candidates(product, columns)
            random.Random(rows).shuffle(found)
            if exact and is_one_sum(product.outputs, product.depth):
                found = [tiling for tiling in found if _parts(tiling) == 1]
            if exact:
                yield Job(product, rows, _of_each_number_of_parts(product, columns_of(rows), found, limit))
                continue
            both = [replace(tiling, dependent=dependent) for tiling in found[:limit] for dependent in (True, False)]
            known = _known(product, 1 if rows == 1 else rows_in_table(rows))
            yield Job(product, rows, [*known, *both])


def _known(product: LayerProduct, columns: int) -> list[AnyTiling]:
    """What the table has, if it has something: what replaces it was measured beside it. columns: 1: of one row."""
    entry = measured_tiling(product.outputs, product.depth, columns, EPILOGUES[product.epilogue])
    if entry is None:
        return []
    return [RowTiling(**entry) if columns == 1 else Tiling(**entry)]


def _of_each_number_of_parts(
    product: LayerProduct, columns: int, candidates: list[AnyTiling], limit: int
) -> list[AnyTiling]:
    """Up to `limit` of each, and what is known to be best for this number of rows."""
    known = _known(product, columns)
    chosen: list[AnyTiling] = [one for one in known if isinstance(one, Tiling) and one.lanes == 1]
    counts: Counter[int] = Counter()
    for tiling in candidates:
        assert isinstance(tiling, Tiling)
        counts[tiling.splits] += 1
        # A part that is one block is summed otherwise where one program takes all parts.
        if counts[tiling.splits] <= limit and product.depth // tiling.splits >= 2 * tiling.block:
            chosen.append(tiling)
    return chosen


Timed: TypeAlias = list[tuple[float, AnyTiling]]


def _parts(tiling: AnyTiling) -> int:
    return tiling.splits if isinstance(tiling, Tiling) else 1


def measured(job: Job, exact: bool) -> Timed:
    """Microseconds of every candidate, ascending; infinite where another was far better, of the same number of parts if
    `exact`. Prints the best ones beside the floor and the vendor's product."""
    outputs, depth = job.product.outputs, job.product.depth
    bench = Bench(job.product, job.rows, max(2, int(GRAPH_BYTES / (2 * outputs * depth))))
    found: Timed = []
    for tiling in job.candidates:
        best = min((took for took, other in found if not exact or _parts(other) == _parts(tiling)), default=math.inf)
        try:
            found.append((graph_us(partial(bench.run, tiling), best * bench.copies * 1.15) / bench.copies, tiling))
        except Exception as error:  # a candidate that this GPU can't hold
            print("  ", tiling, str(error)[:80].replace("\n", " "))
    found.sort(key=lambda one: one[0])
    vendor, floor = graph_us(bench.vendor) / bench.copies, 2 * outputs * depth / READ_BYTES_PER_S * 1e6
    shown = (f"{took:.2f} {'/'.join(str(value) for value in asdict(tiling).values())}" for took, tiling in found[:4])
    print(f"{_key(job, False)}: floor {floor:.2f} vendor {vendor:.2f} µs | {' | '.join(shown)}", flush=True)
    return found


def _key(job: Job, exact: bool) -> str:
    outputs, depth, epilogue, _ = job.product
    return tiling_key(
        outputs, depth, 1 if job.rows == 1 and not exact else columns_of(job.rows), EPILOGUES[epilogue], exact
    )


def same_parts(timed: Mapping[int, Timed]) -> dict[int, AnyTiling]:
    """By number of rows, the best tiling with the number of parts that loses least over all of them."""
    best: dict[int, dict[int, tuple[float, AnyTiling]]] = {}  # by parts, then by rows
    for rows, found in timed.items():
        for took, tiling in found:
            if took < best.setdefault(_parts(tiling), {}).get(rows, (math.inf, tiling))[0]:
                best[_parts(tiling)][rows] = took, tiling
    lost = {
        parts: sum(math.log(took / timed[rows][0][0]) for rows, (took, _) in of_rows.items())
        for parts, of_rows in best.items()
        if of_rows.keys() == timed.keys()
    }
    parts = min(lost, key=lambda one: lost[one])
    shown = " ".join(f"{rows}: {took / timed[rows][0][0]:.2f}" for rows, (took, _) in best[parts].items())
    print(f"   {parts} parts; against the best of each number of rows {shown}", flush=True)
    return {rows: tiling for rows, (_, tiling) in best[parts].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NAMES), help="shapes of the benchmarks")
    parser.add_argument("--rows", default="1,8,16,32,64")
    parser.add_argument("--limit", type=int, default=30, help="candidates of a product")
    parser.add_argument("--seconds", type=float, default=400, help="no product is begun after so many")
    parser.add_argument("--exact", action="store_true", help="as many parts of the depth for every number of rows")
    parser.add_argument("--out", type=Path, default=TABLE)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    began = time.monotonic()
    batches = [int(rows) for rows in chosen.rows.split(",")]
    work = list(jobs(chosen.models.split(","), batches, chosen.limit, chosen.exact))
    if chosen.compile is not None:
        each = [(job, tiling) for job in work for tiling in job.candidates]
        for job, tiling in each[part_of(chosen.compile)]:
            try:
                Bench(job.product, job.rows, 1).run(tiling)
            except Exception as error:
                print("  ", tiling, str(error)[:80].replace("\n", " "))
        return
    flags = ["--models", chosen.models, "--rows", chosen.rows, "--limit", str(chosen.limit)]
    flags += ["--exact"] if chosen.exact else []
    compile_side_by_side("benchmarks.tune.products", flags)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    table: dict[str, dict[str, Any]] = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    mine = table.setdefault(torch.cuda.get_device_name(), {})
    timed: dict[LayerProduct, dict[int, Timed]] = {}
    for job in work:
        if time.monotonic() - began > chosen.seconds:
            print("the time is up")
            break
        of_product = timed.setdefault(job.product, {})
        of_product[job.rows] = found = measured(job, chosen.exact)
        if found and not chosen.exact:
            mine[_key(job, False)] = asdict(found[0][1])
        if chosen.exact and len(of_product) == len(batches):
            for rows, tiling in same_parts(of_product).items():
                mine[_key(job._replace(rows=rows), True)] = asdict(tiling)
        torch.cuda.empty_cache()
    chosen.out.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
