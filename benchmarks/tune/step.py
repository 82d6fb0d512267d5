"""Finds how a decode launch is best cut on this GPU, in the launch itself: `python -m benchmarks.tune.step`.

Kernels run into each other: a program that starts early takes registers and shared memory from the kernel before, so
that what is fastest alone may slow its neighbours. Here F of a model with random weights is a captured graph, in which
attention and one product after the other, those of experts among them, are cut in other ways, while the rest stays as
the best that was found. It prints the best ways; with --out they join the table beside the kernels. Attention that is
not in that table is cut as `attention_plan` in the kernels' `tilings.py` says.

A plan of attention holds for every context: with several in --tokens a way takes as long as the geometric mean of them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from benchmarks.gpu_table.shapes import SHAPES
from benchmarks.tune import attention, experts, products
from benchmarks.tune.decode_step import ATTENTION, Step, Way, of_each_kind
from benchmarks.tune.trial import compile_side_by_side, part_of
from runahead.runtime.kernels.triton import tilings
from runahead.runtime.kernels.triton.decode_work import AttentionPlan
from runahead.runtime.kernels.triton.row_product import EPILOGUES
from runahead.runtime.kernels.triton.tiling_counts import LayerProduct
from runahead.runtime.kernels.triton.tilings import plan_key, row_tiling, rows_tiling
from runahead.runtime.models.weights import described

_PLANS: Final = 8  # of attention, for a kernel: programs and items cost no compilation
_AGAIN: Final = 3  # of the best ways, tried again when everything else has been chosen
_SHOWN: Final = 5
_NOISE: Final = 1e-3  # of a launch's time: by so much one and the same way differs from look to look
_DRAWN: Final = 2  # times its weights is what a model takes while it is made
_BESIDE: Final = 2 << 30  # bytes that a process takes on a GPU besides


def candidates(step: Step, limit: int, only: str) -> dict[str, list[Way]]:
    """By what is cut: other ways to cut it, for which up to `limit` kernels are compiled. only: parts of names, by
    commas; what has none of them in its name is not cut otherwise."""
    dice = random.Random(step.rows)
    plans = list(_plans(step))
    dice.shuffle(plans)
    found: dict[str, list[Way]] = {ATTENTION: [*_of_few_kernels(plans, limit)]}
    for key, (product, columns) in step.asked.items():
        found[key] = [_not_measured(product, columns), *_ways_of(product, columns, limit, dice)]
    for key, asked in step.asked_experts.items():
        if asked.columns:
            cuts: list[Way] = [*experts.tilings(asked.product, asked.columns)]
        else:
            cuts = [*experts.row_tilings()]
        dice.shuffle(cuts)
        found[key] = cuts[:limit]
    return {key: ways for key, ways in found.items() if any(part in key for part in only.split(","))}


def _ways_of(product: LayerProduct, columns: int, limit: int, dice: random.Random) -> Iterator[products.AnyTiling]:
    """Of one row all are launched programmatically; of several every second is not."""
    if columns == 1:
        of_row = [*products.row_candidates(product)]
        dice.shuffle(of_row)
        yield from of_row[:limit]
        return
    by_lanes = [*products.lanes_candidates(product, columns)]
    others = [*products.rows_candidates(product, columns)]
    dice.shuffle(others)
    dice.shuffle(by_lanes)
    for way in (by_lanes[: limit // 4] + others)[: limit // 2]:  # of others there are many more
        yield from (replace(way, dependent=on) for on in (True, False))


def _not_measured(product: LayerProduct, columns: int) -> products.AnyTiling:
    """What a GPU takes that is not in the table, which was not tuned for one shape alone."""
    outputs, depth, epilogue = product.outputs, product.depth, EPILOGUES[product.epilogue]
    with mock.patch.object(tilings, "_measured", dict):
        if columns == 1:
            return row_tiling(outputs, depth, epilogue)
        return rows_tiling(outputs, depth, columns, epilogue)


def _plans(step: Step) -> Iterator[AttentionPlan]:
    """More than those that are good where nothing else runs. Where a row has several query tokens a program has more to
    do for each of a tile's: with more warps, or for some of the query tokens alone."""
    shares = [0, *(1 << bit for bit in range(step.queries.bit_length()) if 1 << bit < step.queries)]
    of_contexts = (attention.plans(step.rows, step.shape.kv_heads, step.head_dim, tokens) for tokens in step.contexts)
    for plan in itertools.chain(*of_contexts):
        for programs, share in itertools.product(range(1, 7), shares):
            yield replace(plan, programs=programs * attention.PROCESSORS, share=share)
            if step.queries > 1 and plan.warps == 4:
                yield replace(plan, programs=programs * attention.PROCESSORS, share=share, warps=8)


def _kernel(key: str, way: Way) -> tuple[object, ...]:
    """What is compiled for it."""
    if isinstance(way, AttentionPlan):
        return key, way.tile, way.warps, way.stages, way.early, way.share
    return key, way


def _of_few_kernels(plans: Sequence[AttentionPlan], limit: int) -> Iterator[AttentionPlan]:
    kernels: dict[tuple[object, ...], set[AttentionPlan]] = {}
    for plan in plans:
        if len(kernels) < limit or _kernel(ATTENTION, plan) in kernels:
            of_kernel = kernels.setdefault(_kernel(ATTENTION, plan), set())
            if len(of_kernel) < _PLANS and plan not in of_kernel:
                of_kernel.add(plan)
                yield plan


def _compile(step: Step, limit: int, only: str, part: slice) -> None:
    step.run()
    usual = dict(step.ways)
    kernels = {_kernel(key, way): (key, way) for key, ways in candidates(step, limit, only).items() for way in ways}
    for key, way in list(kernels.values())[part]:
        step.ways = {**usual, key: way}
        try:
            step.run()
        except Exception as error:
            say_why_not(way, error)


def tune(step: Step, tried: dict[str, list[Way]]) -> dict[str, Way]:
    """The best way to cut what is named in `tried`, of the ways there and what it has been until now, which stays where
    others are better by no more than noise: launches of other models, with the same product, may have been tuned by it.
    """
    before = step.us()
    print(f"{step}: {before:.1f} µs", flush=True)
    for _ in range(2):
        for key, ways in tried.items():
            usual = step.ways[key]
            timed = [(step.us(), usual)]
            for way in ways:
                step.ways[key] = way
                try:
                    timed.append((step.us(), way))
                except Exception as error:
                    say_why_not(way, error)
            (as_it_was, _), *_ = timed
            timed.sort(key=lambda one: one[0])
            is_better = timed[0][0] < as_it_was * (1 - _NOISE)
            step.ways[key] = timed[0][1] if is_better else usual
            shown = (f"{took:.1f} {brief(way)}" for took, way in timed[:_SHOWN])
            print(f"{key}, until now {brief(usual)}: {' | '.join(shown)}", flush=True)
            tried[key] = [way for _, way in timed if way != step.ways[key]][:_AGAIN]
    print(f"{step}: {before:.1f} -> {step.us():.1f} µs", flush=True)
    return {key: step.ways[key] for key in tried}


def brief(way: Way) -> str:
    return "/".join(str(value) for value in asdict(way).values())


def say_why_not(way: Way, error: Exception) -> None:
    """A way that this GPU can't hold."""
    print("  ", way, str(error)[:80].replace("\n", " "), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="0.6B:1,0.6B:8", help="NAME:ROWS or NAME:ROWSxQUERIES, by commas")
    parser.add_argument("--tokens", default="672", help="of a row; several, by commas, each as good as the others")
    parser.add_argument("--limit", type=int, default=40, help="kernels that are compiled for a product")
    parser.add_argument(
        "--only", default="", help="parts of the names of what is cut, by commas: attention, experts, store, gated"
    )
    parser.add_argument("--seconds", type=float, default=400, help="no step is begun after so many")
    parser.add_argument("--out", type=Path, help="the table that the ways join")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    steps = [named_step(step) for step in chosen.steps.split(",")]
    contexts = [int(tokens) for tokens in chosen.tokens.split(",")]
    if chosen.compile is not None:
        for name, rows, queries in steps:
            step = Step(name, rows, contexts, few_layers=True, queries=queries)
            _compile(step, chosen.limit, chosen.only, part_of(chosen.compile))
        return
    flags = [f"--{flag}={getattr(chosen, flag)}" for flag in ("steps", "tokens", "limit", "only")]
    compile_side_by_side("benchmarks.tune.step", flags, _workers(steps))
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    for name, rows, queries in steps:
        if time.monotonic() - began > chosen.seconds:
            print("the time is up")
            break
        step = Step(name, rows, contexts, queries=queries)
        step.run()
        ways = tune(step, candidates(step, chosen.limit, chosen.only))
        if chosen.out is not None:
            join_table(chosen.out, torch.cuda.get_device_name(), step, ways)
        del step
        gc.collect()  # so that the next one's weights have room, whatever has held the model in a circle
        torch.cuda.empty_cache()


def _workers(steps: Iterable[tuple[str, int, int]]) -> int:
    """Processes that find room on the GPU at a time, each with a layer of each kind."""
    largest = max(described(of_each_kind(SHAPES[name].described())).parameters for name, _, _ in steps)
    _, memory = torch.cuda.mem_get_info()
    return max(1, memory // (_DRAWN * largest * torch.bfloat16.itemsize + _BESIDE))


def named_step(step: str) -> tuple[str, int, int]:
    """A model's name, rows and query tokens of a row, of NAME:ROWS or NAME:ROWSxQUERIES."""
    name, _, numbers = step.partition(":")
    rows, _, queries = numbers.partition("x")
    return name, int(rows), int(queries or 1)


def join_table(out: Path, gpu: str, step: Step, ways: dict[str, Way]) -> None:
    """A step's ways, under the GPU's name; what stands there of others stays."""
    named = {key: asdict(way) for key, way in ways.items() if key != ATTENTION}
    if ATTENTION in ways and len(step.shapes) == 1:  # `measured_plan` gives none to a model with several
        named[plan_key(step.shape, step.rows, step.queries)] = asdict(ways[ATTENTION])
    table: dict[str, dict[str, Any]] = json.loads(out.read_text()) if out.exists() else {}
    table.setdefault(gpu, {}).update(named)
    out.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
