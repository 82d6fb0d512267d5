"""Finds how the products of launches of 2 to 8 lines are best cut on this GPU: `python -m benchmarks.tune.few_lines`.

A line is a query token: the newest of a row, or one of its drafts. First each product of a model is timed alone, for
eight lines: as the table of tilings has it, by lanes in all sensible ways, and in some other ways. It prints how many
microseconds they took, and at which share of the memory's bandwidth they read weights. Then the best of these ways, and
plans of attention, are tried in the launches themselves, and what is best there joins the table. A step of one line is
timed twice, by the products that it has and by those of several lines, and joins no table.

Where time is up, what is found until then stays.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from benchmarks.tune import step as step_tuner
from benchmarks.tune.decode_step import Step, Way
from benchmarks.tune.products import (
    GRAPH_BYTES,
    AnyTiling,
    Bench,
    lanes_candidates,
    products,
    rows_candidates,
)
from benchmarks.tune.trial import READ_BYTES_PER_S, compile_in_copies, graph_us, usable_cores
from runahead.runtime.kernels.triton.row_product import EPILOGUES
from runahead.runtime.kernels.triton.tiling_counts import LayerProduct
from runahead.runtime.kernels.triton.tilings import TABLE, Tiling, rows_tiling

LINES: Final = 8
_HOPELESS: Final = 1.3  # times the best so far: it is not timed again
_SEED: Final = 1
_COPIES_OF_STEP: Final = 4  # of the process, which share the plans of attention of a step with several query tokens


@dataclass(frozen=True, slots=True)
class Timed:
    """A way to cut a product, and the microseconds that it took alone."""

    us: float
    tiling: Tiling


def ways_of(product: LayerProduct, others: int) -> list[Tiling]:
    """As the table has it, or the default; by lanes; and as many `others` of those that have no lanes; each launched
    programmatically and not."""
    by_rows = list(rows_candidates(product, LINES))
    random.Random(_SEED).shuffle(by_rows)
    found = [_from_table(product), *lanes_candidates(product, LINES), *by_rows[:others]]
    return list(dict.fromkeys(replace(way, dependent=on) for way in found for on in (True, False)))


def compilations(name: str, others: int) -> Iterator[Callable[[], None]]:
    """Each runs a product of a model in one way, and so compiles it: alone, and as it is where the residual that it
    reads was made by programs of 16, 32 or 64 outputs."""
    for product in products(name):
        for way in ways_of(product, others):
            for outputs in (64, 32, 16) if product.normed and way.lanes > 1 else (64,):
                yield partial(_run_once, product, way, product.depth // outputs)


def _run_once(product: LayerProduct, way: Tiling, tiles: int) -> None:
    Bench(product, LINES, 1).run(way, tiles)


def _run_step(named: tuple[str, int, int], tokens: int, plans: int, part: slice) -> None:
    """Compiles what a launch takes now, and attention by some of the plans that are tried."""
    name, rows, queries = named
    step = Step(name, rows, [tokens], few_layers=True, queries=queries)
    step.run()
    for plan in step_tuner.candidates(step, plans, "attention")["attention"][part]:
        step.ways["attention"] = plan
        step.run()


def _from_table(product: LayerProduct) -> Tiling:
    return rows_tiling(product.outputs, product.depth, LINES, EPILOGUES[product.epilogue])


def timed_alone(product: LayerProduct, ways: Iterable[Tiling]) -> list[Timed]:
    """Ascending. What this GPU can't hold is left out, and said."""
    size = 2 * product.outputs * product.depth
    bench = Bench(product, LINES, max(2, int(GRAPH_BYTES / size)))
    found: list[Timed] = []
    best = float("inf")
    for way in ways:
        try:
            us = graph_us(partial(bench.run, way), best * bench.copies * _HOPELESS) / bench.copies
        except Exception as error:
            step_tuner.say_why_not(way, error)
            continue
        best = min(best, us)
        found.append(Timed(us, way))
    return sorted(found, key=lambda one: one.us)


def table_of(name: str, product: LayerProduct, found: Sequence[Timed]) -> str:
    """A line: what the table had, the best by lanes, and the best without, each with its share of the bandwidth."""
    floor = 2 * product.outputs * product.depth / READ_BYTES_PER_S * 1e6
    before = _from_table(product)
    kinds = {
        "until now": [one for one in found if one.tiling == before],
        "lanes": [one for one in found if one.tiling.lanes > 1],
        "without": [one for one in found if one.tiling.lanes == 1],
    }
    shown = (
        f"{kind} {ones[0].us:.2f} ({floor / ones[0].us:.0%}) {step_tuner.brief(ones[0].tiling)}"
        for kind, ones in kinds.items()
        if ones
    )
    epilogue = EPILOGUES[product.epilogue]
    return f"{name} {product.outputs}x{product.depth} {epilogue}: bytes {floor:.2f} µs | {' | '.join(shown)}"


def shortlist(found: Sequence[Timed], best: int) -> list[AnyTiling]:
    """The best by lanes, and half as many of the best without."""
    lanes = [one.tiling for one in found if one.tiling.lanes > 1][:best]
    without = [one.tiling for one in found if one.tiling.lanes == 1][: max(best // 2, 1)]
    return [*lanes, *without]


def tried_in(step: Step, short: dict[LayerProduct, list[AnyTiling]], plans: int) -> dict[str, list[Way]]:
    """By what is cut, as `step_tuner.tune` wants it: attention first, by up to so many kernels, where rows have several
    query tokens; then the products that several lines go through together."""
    found = step_tuner.candidates(step, plans, "attention") if step.queries > 1 else {}
    for key, (product, columns) in step.asked.items():
        ways = [short[one] for one in short if one[:3] == product[:3]]
        if ways and columns > 1:
            found[key] = list(ways[0])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", default="0.6B:1x4,0.6B:8,8B:8,1B:8,0.6B:1,1B:1x4,8B:1x4", help="as `benchmarks.tune.step`'s"
    )
    parser.add_argument("--tokens", type=int, default=672, help="of a row")
    parser.add_argument("--others", type=int, default=4, help="ways without lanes that are tried of a product")
    parser.add_argument("--best", type=int, default=6, help="ways by lanes of a product that are tried in a launch")
    parser.add_argument("--plans", type=int, default=16, help="kernels of attention that are tried in a launch")
    parser.add_argument("--seconds", type=float, default=85, help="nothing is begun after so many")
    parser.add_argument("--compile-seconds", type=float, default=45, help="what is not compiled then is when it is run")
    parser.add_argument("--out", type=Path, default=TABLE, help="the table that the ways join")
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    steps = [step_tuner.named_step(step) for step in chosen.steps.split(",")]
    names = list(dict.fromkeys(name for name, _, _ in steps))

    def late(what: str) -> bool:
        over = time.monotonic() - began > chosen.seconds
        if over:
            print(f"the time is up before {what}", flush=True)
        return over

    def compile_part(part: slice) -> None:
        each = [run for name in names for run in compilations(name, chosen.others)]
        each += [
            partial(_run_step, step, chosen.tokens, chosen.plans, slice(first, None, copies))
            for step in steps
            for copies in (_COPIES_OF_STEP if step[2] > 1 else 1,)
            for first in range(copies)
        ]
        for run in each[part]:
            try:
                run()
            except Exception as error:
                print("  ", str(error)[:100].replace("\n", " "))

    failed = compile_in_copies(compile_part, usable_cores(), chosen.compile_seconds)
    print(f"compiled in {time.monotonic() - began:.0f} s, {len(failed)} copies were not done", flush=True)
    short: dict[LayerProduct, list[AnyTiling]] = {}
    for name in names:
        for product in products(name):
            if late(f"a product of {name}"):
                break
            found = timed_alone(product, ways_of(product, chosen.others))
            print(table_of(name, product, found), flush=True)
            short[product] = shortlist(found, chosen.best)
            torch.cuda.empty_cache()
    for name, rows, queries in steps:
        if late(f"{name}, {rows} rows of {queries}"):
            break
        if rows * queries == 1:
            _compare_one_row(name, chosen.tokens, short)
            continue
        step = Step(name, rows, [chosen.tokens], queries=queries)
        step.run()
        found_ways = step_tuner.tune(step, tried_in(step, short, chosen.plans))
        step_tuner.join_table(chosen.out, torch.cuda.get_device_name(), step, found_ways)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        torch.cuda.empty_cache()


def _compare_one_row(name: str, tokens: int, short: dict[LayerProduct, list[AnyTiling]]) -> None:
    """Whether a row alone would be better off on the matrix units. It joins no table."""
    usual = Step(name, 1, [tokens])
    usual.run()
    print(f"{usual}: {usual.us():.1f} µs by multiply-adds", flush=True)
    del usual
    step = Step(name, 1, [tokens], on_units=True)
    step.run()
    step_tuner.tune(step, tried_in(step, short, 0))
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
