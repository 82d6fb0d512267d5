"""The tuner of launches of 2 to 8 lines, in the interpreter, where a test says how long each way takes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from benchmarks.tune import decode_step, few_lines  # noqa: E402
from benchmarks.tune import step as step_tuner  # noqa: E402
from benchmarks.tune.decode_step import Step, Way  # noqa: E402
from benchmarks.tune.few_lines import Timed  # noqa: E402
from benchmarks.tune.products import NAMES, lanes_candidates, products  # noqa: E402
from runahead.runtime.kernels.triton.lanes_product import GRAIN, blocks_held  # noqa: E402
from runahead.runtime.kernels.triton.row_product import EPILOGUES, GATED  # noqa: E402
from runahead.runtime.kernels.triton.tilings import tiling_key  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU the tuner itself says what is faster")


@pytest.mark.parametrize("name", NAMES)
def test_every_product_has_ways_by_lanes_that_its_kernel_takes(name: str) -> None:
    for product in products(name):
        ways = list(lanes_candidates(product, few_lines.LINES))
        assert 2 <= len(ways) <= 20
        for way in ways:
            tile = way.rows * (2 if product.epilogue == GATED else 1)
            held = blocks_held(product.depth, way.lanes, way.block, tile)
            assert tile in (16, 32, 64) and way.block % GRAIN == 0 and way.lanes == way.warps
            assert product.depth % (way.lanes * way.block * held) == 0
            # Two bytes each of so many threads: no more than half of what registers there are.
            assert tile * way.block * held * 2 <= 32 * 4 * 128


def test_each_way_is_compiled_as_launches_have_it() -> None:
    """A normed product reads sums of squares by as many tiles as its predecessor's programs have left."""
    ways = {product: few_lines.ways_of(product, 2) for product in products("0.6B")}
    by_lanes = sum(way.lanes > 1 for product, found in ways.items() if product.normed for way in found)
    assert len(list(few_lines.compilations("0.6B", 2))) == sum(map(len, ways.values())) + 2 * by_lanes
    assert all({way.dependent for way in found} == {True, False} for found in ways.values())


def test_the_best_of_each_kind_are_tried_in_the_launch_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    product = products("0.6B")[0]
    ways = few_lines.ways_of(product, 3)
    found = sorted((Timed(5.0 + number % 7, way) for number, way in enumerate(ways)), key=lambda one: one.us)
    short = few_lines.shortlist(found, 4)
    assert [way.lanes > 1 for way in short] == [True] * 4 + [False] * 2  # type: ignore[union-attr]
    assert short[0] == next(one.tiling for one in found if one.tiling.lanes > 1)
    line = few_lines.table_of("0.6B", product, found)
    assert line.startswith("0.6B 4096x1024 store: bytes 1.82 µs | until now 5.00 (36%)") and "| lanes " in line

    monkeypatch.setattr(decode_step, "_CONTEXT", 64)
    step = Step("tiny", 1, [20], few_layers=True, queries=4, device=DEVICE)
    step.run()
    asked = {key: product for key, (product, _) in step.asked.items()}
    tried = few_lines.tried_in(step, {next(iter(asked.values())): list(short)}, 2)
    assert set(tried) == {"attention", next(iter(asked))} and tried[next(iter(asked))] == short


def test_what_is_best_joins_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tuner as it is called, each time a made-up one: 4 lines of one row have names of their own."""
    product = products("0.6B")[0]
    key, out = tiling_key(*product[:2], 4, EPILOGUES[product.epilogue]), tmp_path / "table.json"
    ways = few_lines.ways_of(product, 1)

    class Launch:
        def __init__(self, name: str, rows: int, contexts: list[int], *, queries: int) -> None:
            assert (name, rows, contexts, queries) == ("0.6B", 1, [672], 4)
            self.queries, self.asked, self.ways = queries, {key: (product, 4)}, {key: ways[0]}

        def run(self) -> None: ...

        def us(self) -> float:
            return 100.0 - (self.ways[key] == ways[3])

    def candidates(*_: Any) -> dict[str, list[Way]]:
        return {}

    monkeypatch.setattr(few_lines, "products", lambda name: (product,))
    monkeypatch.setattr(few_lines, "compile_in_copies", lambda *_: [])
    monkeypatch.setattr(few_lines, "timed_alone", lambda _, tried: [Timed(1.0 + i, way) for i, way in enumerate(tried)])
    monkeypatch.setattr(few_lines, "Step", Launch)
    compared: list[str] = []
    monkeypatch.setattr(few_lines, "_compare_one_row", lambda name, *_: compared.append(name))
    monkeypatch.setattr(step_tuner, "candidates", candidates)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    few_lines.main(["--steps", "0.6B:1x4,0.6B:1", "--others", "1", "--out", str(out)])
    assert json.loads(out.read_text()) == {"a GPU": {key: asdict(ways[3])}}
    assert compared == ["0.6B"]
