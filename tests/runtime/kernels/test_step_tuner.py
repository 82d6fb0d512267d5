"""The tuner that cuts a decode launch in other ways, in the interpreter, where a test says how long each way takes."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from benchmarks.tune import decode_step  # noqa: E402
from benchmarks.tune import step as step_tuner  # noqa: E402
from benchmarks.tune.decode_step import Step  # noqa: E402
from runahead.runtime.kernels.triton import decode_streams, kernel_set, tilings  # noqa: E402
from runahead.runtime.kernels.triton.decode_work import AttentionPlan  # noqa: E402
from runahead.runtime.kernels.triton.expert_tilings import ExpertRowTiling, ExpertTiling  # noqa: E402
from runahead.runtime.kernels.triton.tiling_counts import LayerProduct  # noqa: E402
from runahead.runtime.kernels.triton.tilings import RowTiling, Tiling, plan_key, tiling_key  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU the tuner itself says what is faster")
QKV, OUTPUT = (128, 64, "store"), (64, 64, "add")


def small_step(monkeypatch: pytest.MonkeyPatch, rows: int, queries: int = 1) -> Step:
    monkeypatch.setattr(decode_step, "_CONTEXT", 64)
    return Step("tiny", rows, [20], few_layers=True, queries=queries, device=DEVICE)


def test_a_step_runs_as_it_is_cut_and_says_what_it_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    step = small_step(monkeypatch, 1)
    step.ways["attention"] = AttentionPlan(16, 1, 3, 1, stages=1, early=True)
    key = tiling_key(*OUTPUT[:2], 1, OUTPUT[2])
    step.ways[key] = RowTiling(4, 32, 2, 2)
    step.run()
    assert step.ways["attention"] == AttentionPlan(16, 1, 3, 1, stages=1, early=True), "what was chosen stays"
    assert step.ways[key] == RowTiling(4, 32, 2, 2)
    assert set(step.ways) == {"attention", *step.asked}
    assert len(step.asked) == 5 and (step.asked[key][0][:2], step.asked[key][1]) == (OUTPUT[:2], 1)


def test_the_fastest_way_is_found_and_kept_for_what_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    step = small_step(monkeypatch, 1)
    keys = [tiling_key(outputs, depth, 1, epilogue) for outputs, depth, epilogue in (QKV, OUTPUT)]
    fast = {keys[0]: RowTiling(2, 64, 1, 8), keys[1]: RowTiling(8, 64, 1, 2)}
    tried: dict[str, list[decode_step.Way]] = {key: [RowTiling(4, 64, 1, 4), fast[key]] for key in keys}
    step.run()
    seen = []

    def us() -> float:
        seen.append(dict(step.ways))
        return 100.0 - sum(step.ways[key] == way for key, way in fast.items())

    monkeypatch.setattr(step, "us", us)
    assert step_tuner.tune(step, tried) == fast
    later = [ways for ways in seen if ways[keys[1]] == fast[keys[1]]]
    assert later and all(ways[keys[0]] == fast[keys[0]] for ways in later[:2]), "the first was chosen by then"


def test_what_is_faster_by_noise_alone_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step, (outputs, depth, epilogue) = small_step(monkeypatch, 1), QKV
    key, other = tiling_key(outputs, depth, 1, epilogue), RowTiling(2, 64, 1, 8)
    step.run()
    usual = step.ways[key]
    monkeypatch.setattr(step, "us", lambda: 1000.0 - 0.5 * (step.ways[key] == other))
    assert other != usual and step_tuner.tune(step, {key: [other]}) == {key: usual}


def test_a_step_may_have_several_query_tokens_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_tuner.named_step("0.6B:1x4") == ("0.6B", 1, 4) and step_tuner.named_step("8B:8") == ("8B", 8, 1)
    step = small_step(monkeypatch, 2, queries=2)
    step.run()
    assert {columns for _, columns in step.asked.values()} == {4}, "the table has names for four lines"
    assert bool(step._logits.isfinite().all()) and step._logits.shape[0] == 4


def test_one_row_may_go_through_the_matrix_units_as_two_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest shape has a depth that they do not take, so it is looked at who would be asked."""
    step, asked = small_step(monkeypatch, 1), list[object]()

    def forward(*_: Any) -> torch.Tensor:
        asked.append(vars(kernel_set)["OneRow"])
        return torch.zeros((1, 64), dtype=torch.bfloat16)

    monkeypatch.setattr(step._model, "forward", forward)
    for step.on_units in (False, True):
        step.run()
    assert asked == [decode_streams.OneRow, decode_streams.FusedRows]


def test_a_row_with_a_state_has_drafts_behind_its_newest_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "_CONTEXT", 64)
    step = Step("tiny-hybrid", 2, [20], few_layers=True, queries=3, device=DEVICE)
    (batch,), (run,) = step._batches, step._cache.runs
    assert run.shape[:2] == (2, 2) and batch.replayed is not None and batch.certain is not None
    assert batch.replayed.tolist() == [2, 2] and batch.certain.tolist() == [1, 1]
    step.run()
    assert bool(run.any(-1).all()) and bool(step._logits.isfinite().all()), "each row's drafts have left their inputs"
    assert set(step.asked_experts) == {f"2/8 experts of 64x64 {which} 8" for which in ("gated", "last")}


@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_of_a_hybrid_with_experts_has_a_layer_of_each_kind(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(decode_step, "_CONTEXT", 64)
    step = Step("tiny-hybrid", rows, [20, 40], few_layers=True, device=DEVICE)
    assert len(step._cache.states) == len(step._cache.keys) == 1, "the first and the third of three layers are alike"
    step.run()
    names = [f"2/8 experts of 64x64 {which} {rows}" for which in ("gated", "last")]
    assert list(step.asked_experts) == names and set(step.ways) == {"attention", *step.asked, *names}
    found = step_tuner.candidates(step, 4, "attention,experts")
    assert list(found) == ["attention", *names]
    kind = ExpertRowTiling if rows == 1 else ExpertTiling
    usual, logits = step.ways[names[1]], step._logits.clone()
    step.ways[names[1]] = next(way for way in found[names[1]] if isinstance(way, kind) and way != usual)
    for state in itertools.chain(*step._cache.states):
        state.zero_()  # as it was before the first run
    step.run()
    assert bool(torch.isfinite(logits).all()) and torch.allclose(step._logits, logits, atol=0.05)


def test_a_way_takes_as_long_as_the_mean_of_its_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "_CONTEXT", 64)
    step, lengths = Step("tiny", 2, [20, 40], few_layers=True, device=DEVICE), list[int]()

    def graph_us(work: partial[None]) -> float:
        (batch,) = work.args
        lengths.append(int(batch.seq_lens.max()))
        return float(10 * len(lengths))

    monkeypatch.setattr(decode_step, "graph_us", graph_us)
    assert step.us() == pytest.approx(200**0.5) and lengths == [20, 40]


def test_candidates_of_a_few_rows_are_of_both_kinds_and_of_few_kernels() -> None:
    asked = {"4096x1024 store 8": (LayerProduct(4096, 1024, 0, normed=False), 8)}
    shape = SimpleNamespace(kv_heads=8)
    step: Any = SimpleNamespace(
        rows=8, queries=1, contexts=[672], head_dim=128, shape=shape, asked=asked, asked_experts={}
    )
    found = step_tuner.candidates(step, 40, "")
    ways = [way for way in found["4096x1024 store 8"] if isinstance(way, Tiling)]
    assert len(ways) == 41 and ways[0] == tilings.rows_tiling(4096, 1024, 8, "store"), "nothing is measured here"
    assert {way.lanes > 1 for way in ways[1:]} == {way.dependent for way in ways[1:]} == {True, False}
    plans = [way for way in found["attention"] if isinstance(way, AttentionPlan)]
    assert 10 < len({step_tuner._kernel("attention", way) for way in plans}) <= 40 < len(plans)
    assert list(step_tuner.candidates(step, 40, "store")) == ["4096x1024 store 8"]


def test_candidates_of_one_row_are_launched_programmatically() -> None:
    asked = {"4096x1024 store 1": (LayerProduct(4096, 1024, 0, normed=False), 1)}
    shape = SimpleNamespace(kv_heads=8)
    step: Any = SimpleNamespace(
        rows=1, queries=1, contexts=[672], head_dim=128, shape=shape, asked=asked, asked_experts={}
    )
    first, *ways = step_tuner.candidates(step, 20, "store")["4096x1024 store 1"]
    assert first == tilings.row_tiling(4096, 1024, "store"), "nothing is measured here"
    assert len(set(ways)) == 20 and all(isinstance(way, RowTiling) and way.dependent for way in ways)


def test_what_was_found_joins_the_table_and_nothing_leaves_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Plans of attention by its shape, by rows and by query tokens of a row."""
    out = tmp_path / "table.json"
    out.write_text(json.dumps({"a GPU": {"another product": {"rows": 1}}, "another GPU": {}}))
    ways: dict[str, decode_step.Way] = {
        "a product": RowTiling(2, 64, 1, 8),
        "attention": AttentionPlan(16, 1, 3, 1, stages=1, early=True),
    }
    step = small_step(monkeypatch, 2)
    step_tuner.join_table(out, "a GPU", step, ways)
    table, plan = json.loads(out.read_text()), plan_key(step.shape, 2, 1)
    assert set(table) == {"a GPU", "another GPU"} and set(table["a GPU"]) == {"another product", "a product", plan}
    assert RowTiling(**table["a GPU"]["a product"]) == ways["a product"]
    several = small_step(monkeypatch, 2, queries=3)
    step_tuner.join_table(out, "a GPU", several, ways)
    entry = json.loads(out.read_text())["a GPU"][plan_key(several.shape, 2, 4)]
    assert AttentionPlan(**entry) == ways["attention"]


def test_a_plan_of_the_table_is_that_of_launches_with_so_many_query_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    step = small_step(monkeypatch, 2, queries=3)
    plan = AttentionPlan(16, 2, 5, 2, stages=3, early=False, share=2)
    monkeypatch.setattr(tilings, "_measured", lambda: {plan_key(step.shape, 2, 4): asdict(plan)})
    step.run()
    assert step.ways["attention"] == plan, "three are cut as four are"
    assert tilings.measured_plan([step.shape], 1, 4) is None
    assert tilings.measured_plan([step.shape, replace(step.shape, head_dim=32)], 2, 4) is None
