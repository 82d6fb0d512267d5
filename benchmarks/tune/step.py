"""Finds how a decode launch is best cut on this GPU, in the launch itself: `python -m benchmarks.tune.step`.

Kernels run into each other: a program that starts early takes registers and shared memory from the kernel before, so
that what is fastest alone may slow its neighbours. Here F of a model with random weights is a captured graph, in which
attention and one product after the other are cut in other ways, while the rest stays as the best that was found. It
prints the best ways; with --out they join the table beside the kernels. Attention that is not in that table is cut as
`attention_plan` in the kernels' `tilings.py` says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias
from unittest import mock

import torch

from benchmarks.gpu_table.shapes import SHAPES
from benchmarks.tune import attention, products
from benchmarks.tune.products import AnyTiling
from benchmarks.tune.trial import compile_side_by_side, graph_us, part_of
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import Attention, AttentionShape
from runahead.runtime.kernels.triton import decode_buffers, decode_streams, kernel_set, loose_products
from runahead.runtime.kernels.triton.decode_work import AttentionPlan
from runahead.runtime.kernels.triton.kernel_set import TritonKernelSet
from runahead.runtime.kernels.triton.row_product import EPILOGUES
from runahead.runtime.kernels.triton.tiling_counts import LayerProduct
from runahead.runtime.kernels.triton.tilings import (
    attention_plan,
    measured_plan,
    plan_key,
    row_tiling,
    rows_tiling,
    tiling_key,
)
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.weights import dummy_weights
from runahead.runtime.rounding import ceil_div

_BLOCK_SIZE: Final = 16
_CONTEXT: Final = 4096  # tokens of a row, at most, that the graph is captured for
_ATTENTION: Final = "attention"
_PLANS: Final = 8  # of attention, for a kernel: programs and items cost no compilation
_AGAIN: Final = 3  # of the best ways, tried again when everything else has been chosen
_SHOWN: Final = 5
Way: TypeAlias = AttentionPlan | AnyTiling


@dataclass
class Step:
    """F of a decode launch of `rows` rows of about `tokens` tokens, of which `queries` each are query tokens. layers:
    0: as many as the model has. ways: how it is cut, by what the table calls a product, or "attention"; what is not
    there is cut as it would be otherwise, and joins. asked: the products, by what the table calls them. on_units: one
    row goes through the matrix units, as two would."""

    name: str
    rows: int
    tokens: int
    layers: int = 0
    queries: int = 1
    on_units: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    ways: dict[str, Way] = field(default_factory=dict)
    asked: dict[str, tuple[LayerProduct, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        described = SHAPES[self.name].described()
        config = replace(described, num_layers=self.layers) if self.layers else described
        rows, lines, kernels = self.rows, self.rows * self.queries, TritonKernelSet()
        weights = dummy_weights(config, torch.bfloat16, self.device, kernels.pack_weight)
        shapes = (layer.mixer.shape for layer in weights.layers if isinstance(layer.mixer, Attention))
        self.shape = max(shapes, key=lambda shape: shape.head_dim)
        self.head_dim = self.shape.head_dim
        self._model = Decoder(config, weights, kernels, _CONTEXT)
        blocks = ceil_div(self.tokens, _BLOCK_SIZE)
        self._cache = self._model.make_cache(rows * blocks + 1, _BLOCK_SIZE)
        for tensor in (*self._cache.keys, *self._cache.values):
            tensor.normal_()
        tables = torch.zeros((rows, _CONTEXT // _BLOCK_SIZE), dtype=torch.int32, device=self.device)
        tables[:, :blocks] = torch.randperm(rows * blocks, device=self.device).int().view(rows, blocks) + 1
        row = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        line = torch.arange(lines, dtype=torch.int32, device=self.device)
        lengths = self.tokens - row[:rows] % min(5, self.tokens)
        first = lengths - self.queries
        self._batch = ForwardBatch(
            token_ids=torch.randint(0, config.vocab_size, (lines,), device=self.device),
            positions=(first[line // self.queries] + line % self.queries).long(),
            slot_mapping=torch.zeros(lines, dtype=torch.int64, device=self.device),
            query_start_loc=row * self.queries,
            seq_lens=lengths,
            block_tables=tables,
            num_tokens=lines,
            num_rows=rows,
            max_seq_len=_CONTEXT,
            is_decode=True,
            decode_queries=self.queries,
        )
        self._logits = torch.zeros((lines, config.vocab_size), dtype=torch.float32, device=self.device)
        self._places = line

    def run(self) -> None:
        products: dict[str, Any] = {"row_tiling": self._row_tiling, "rows_tiling": self._rows_tiling}
        with (
            mock.patch.multiple(decode_streams, **products),
            mock.patch.object(decode_buffers, "measured_plan", self._measured_plan),
            mock.patch.multiple(loose_products, **products),
            mock.patch.object(
                kernel_set, "OneRow", decode_streams.FusedRows if self.on_units else decode_streams.OneRow
            ),
        ):
            hidden = self._model.forward(self._batch, self._cache)
            self._model.kernels.logits_into(hidden, self._model.weights.lm_head, self._logits, self._places)

    def us(self) -> float:
        return graph_us(self.run)

    def __str__(self) -> str:
        of_each = "" if self.queries == 1 else f", {self.queries} query tokens each"
        of_each += ", on the matrix units" if self.on_units else ""
        return f"{self.name}, {self.rows} rows of {self.tokens} tokens{of_each}"

    def _row_tiling(self, outputs: int, depth: int, epilogue: str) -> Any:
        return self._product(outputs, depth, 1, epilogue, lambda: row_tiling(outputs, depth, epilogue))

    def _rows_tiling(self, outputs: int, depth: int, columns: int, epilogue: str, exact: bool = False) -> Any:
        return self._product(
            outputs, depth, columns, epilogue, lambda: rows_tiling(outputs, depth, columns, epilogue, exact)
        )

    def _product(self, outputs: int, depth: int, columns: int, epilogue: str, otherwise: Callable[[], Way]) -> Way:
        key = tiling_key(outputs, depth, columns, epilogue)
        self.asked[key] = LayerProduct(outputs, depth, EPILOGUES.index(epilogue), normed=False), columns
        return self._way(key, otherwise)

    def _measured_plan(self, shapes: Iterable[AttentionShape], rows: int, queries: int) -> Any:
        return self._way(
            _ATTENTION,
            lambda: measured_plan(shapes, rows, queries) or attention_plan(rows, self.head_dim, self.device),
        )

    def _way(self, key: str, otherwise: Callable[[], Way]) -> Way:
        if key not in self.ways:
            self.ways[key] = otherwise()
        return self.ways[key]


def candidates(step: Step, limit: int, only: str) -> dict[str, list[Way]]:
    """By what is cut, of which `only` is a part: other ways to cut it, for which up to `limit` kernels are compiled."""
    dice = random.Random(step.rows)
    plans = list(_plans(step))
    dice.shuffle(plans)
    found: dict[str, list[Way]] = {_ATTENTION: [*_of_few_kernels(plans, limit)]}
    for key, (product, columns) in step.asked.items():
        by_lanes: list[AnyTiling] = []
        ways: list[AnyTiling] = []
        if columns == 1:
            ways += products.row_candidates(product)
        else:
            ways += products.rows_candidates(product, columns)
            by_lanes += products.lanes_candidates(product, columns)
        dice.shuffle(ways)
        dice.shuffle(by_lanes)
        ways = by_lanes[: limit // 4] + ways  # of which there are many more
        found[key] = [replace(way, dependent=on) for way in ways[: limit // 2] for on in (True, False)]
    return {key: ways for key, ways in found.items() if only in key}


def _plans(step: Step) -> Iterator[AttentionPlan]:
    """More than those that are good where nothing else runs. Where a row has several query tokens a program has more to
    do for each of a tile's: with more warps, or for some of the query tokens alone."""
    shares = [0, *(1 << bit for bit in range(step.queries.bit_length()) if 1 << bit < step.queries)]
    for plan in attention.plans(step.rows, step.shape.kv_heads, step.head_dim, step.tokens):
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
        if len(kernels) < limit or _kernel(_ATTENTION, plan) in kernels:
            of_kernel = kernels.setdefault(_kernel(_ATTENTION, plan), set())
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
    """The best way to cut what is named in `tried`, of the ways there and what it has been until now."""
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
            timed.sort(key=lambda one: one[0])
            step.ways[key] = timed[0][1]
            shown = (f"{took:.1f} {brief(way)}" for took, way in timed[:_SHOWN])
            print(f"{key}, until now {brief(usual)}: {' | '.join(shown)}", flush=True)
            tried[key] = [way for _, way in timed[1 : _AGAIN + 1]]
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
    parser.add_argument("--tokens", type=int, default=672, help="of a row")
    parser.add_argument("--limit", type=int, default=40, help="kernels that are compiled for a product")
    parser.add_argument("--only", default="", help="a part of the name of what is cut, such as attention or gated")
    parser.add_argument("--seconds", type=float, default=400, help="no step is begun after so many")
    parser.add_argument("--out", type=Path, help="the table that the ways join")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    steps = [named_step(step) for step in chosen.steps.split(",")]
    if chosen.compile is not None:
        for name, rows, queries in steps:
            step = Step(name, rows, chosen.tokens, layers=1, queries=queries)
            _compile(step, chosen.limit, chosen.only, part_of(chosen.compile))
        return
    flags = [f"--{flag}={getattr(chosen, flag)}" for flag in ("steps", "tokens", "limit", "only")]
    compile_side_by_side("benchmarks.tune.step", flags)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    for name, rows, queries in steps:
        if time.monotonic() - began > chosen.seconds:
            print("the time is up")
            break
        step = Step(name, rows, chosen.tokens, queries=queries)
        step.run()
        ways = tune(step, candidates(step, chosen.limit, chosen.only))
        if chosen.out is not None:
            join_table(chosen.out, torch.cuda.get_device_name(), step, ways)
        torch.cuda.empty_cache()


def named_step(step: str) -> tuple[str, int, int]:
    """A model's name, rows and query tokens of a row, of NAME:ROWS or NAME:ROWSxQUERIES."""
    name, _, numbers = step.partition(":")
    rows, _, queries = numbers.partition("x")
    return name, int(rows), int(queries or 1)


def join_table(out: Path, gpu: str, step: Step, ways: dict[str, Way]) -> None:
    """A step's ways, under the GPU's name; what stands there of others stays."""
    named = {key: asdict(way) for key, way in ways.items() if key != _ATTENTION}
    if _ATTENTION in ways:
        named[plan_key(step.shape, step.rows, step.queries)] = asdict(ways[_ATTENTION])
    table: dict[str, dict[str, Any]] = json.loads(out.read_text()) if out.exists() else {}
    table.setdefault(gpu, {}).update(named)
    out.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
