"""What is made of the figures: tables, with goals met and missed."""

from __future__ import annotations

import pytest

from benchmarks.gpu_table.merge import merge
from benchmarks.gpu_table.published import best_peer_ms
from benchmarks.gpu_table.results import Breakdown, KernelTime, RoleTime
from benchmarks.gpu_table.tables import tables
from tests.benchmarks.gpu_table.sample_results import cell, result


def test_the_best_of_the_other_engines_is_the_faster_one_or_the_only_one() -> None:
    assert best_peer_ms("8B", 256) == 14.66
    assert best_peer_ms("0.6B", 64) == 2.98
    assert best_peer_ms("8B", 8) == 5.18
    assert best_peer_ms("tiny", 1) is None


@pytest.mark.parametrize(("ms", "verdict"), [(5.3, "met"), (5.301, "missed")])
def test_a_goal_is_met_up_to_its_limit_and_missed_beyond_it(ms: float, verdict: str) -> None:
    assert f"| 5.30 | {verdict} |" in tables(merge([result("engine-8B", cell("8B", 64, "engine", ms))]))


def test_models_are_held_against_their_goals_overlap_and_one_graph_a_launch() -> None:
    of_models = {"table": "models", "floor_ms": 1.0, "nodes": 500}
    whole = cell("7B-A1B", 1, "engine", 1.25, overlap=0.99, launches=672, not_one_graph={}, **of_models)
    split = cell("7B-A1B", 8, "engine", 3.5, overlap=0.97, launches=672, not_one_graph={"rows": 2}, **of_models)
    text = tables(merge([result("models-7B-A1B", whole, split)]))
    assert (
        "| 7B-A1B | 1 | engine | – | 1.00 | 1.250 | 1.250 | 500 | 672 of 672 | 0.990 | met | 3.29 | 1.30 | met |"
        in text
    )
    assert "| 500 | 670 of 672; not 2 rows | 0.970 | missed | 5.00 | 3.00 | missed |" in text
    assert "In which dtype vLLM kept those of 7B-A1B when it was measured is not known." in text


def test_the_tables_hold_every_figure_and_say_what_is_missing() -> None:
    breakdown = Breakdown(
        shape="8B", rows=1, launches=20, context=672.0, step_us=4695.0, floor_us=3282.0,
        kernels=(KernelTime("_row_product_kernel", "qkv", 32.0, 14.0, 448.0, 0.1, 420.0),),
        roles=(RoleTime("qkv", 448.0, 350.0, 420.0), RoleTime("other", 10.0, None)),
    )  # fmt: skip
    text = tables(
        merge(
            [
                result(
                    "engine-8B",
                    cell("8B", 1, "graph", 4.5, nodes=334, floor_ms=3.28),
                    cell("8B", 1, "engine", 4.62, nodes=334, floor_ms=3.28, idle_us=3.7, overlap=1.0, host_us=91.0),
                    cell("8B", 64, "engine", None),
                ),
                result(
                    "lengths-8B", cell("8B", 8, "engine", 8.0, table="lengths", prompt="128 to 8,192", floor_ms=4.0)
                ),
                result("kernels-8B", breakdowns=(breakdown,)),
            ]
        )
    )
    lines = text.splitlines()
    assert "| 8B | 1 | 3.28 | 4.50 | 4.62 | 1.027 | 4.97 | 4.85 | 1.050 | 3.65 | missed |" in lines
    assert "| 8B | 1 | greedy | engine | 4.620 | 334 | 3.7 | 0.08% | 1.000 | 91 |" in lines
    assert "| 8B | 8 | 128 to 8,192 | 672 | 4.00 | 8.000 | 2.000 | – |" in lines
    assert "| qkv | 420.0 | 350.0 | 1.200 | 448.0 |" in lines and "| other | – | – | – | 10.0 |" in lines
    assert "| `_row_product_kernel` | qkv | 32.0 | 14.00 | 448.0 | 420.0 | 10.00% |" in lines
    assert any("no figure for 8B, batch 64" in line and "had run for 390 s" in line for line in lines)
    assert "Commit 0123456789ab, NVIDIA H200; Xeon, 16 cores, driver 580.1; torch 2.11.0+cu130" in text
