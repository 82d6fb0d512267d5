"""The search for the best way to cut attention of prompt chunks, with times and mistakes made up; and copies of a
process that compile."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.tune.chunk_attention import SHAPES, Search, join_table, plans, table_entry
from benchmarks.tune.trial import ask_a_copy, compile_in_copies
from runahead.runtime.kernels.triton.chunk_plans import ChunkPlan

FAST, EVEN, SLOW = (ChunkPlan(lines=128, keys=keys, programs=132, warps=8, stages=2) for keys in (32, 64, 128))


class Asked:
    """Which plans were compared; all but those of `wrong` are right."""

    def __init__(self, *wrong: ChunkPlan) -> None:
        self.wrong, self.plans = wrong, list[ChunkPlan]()

    def __call__(self, plan: ChunkPlan) -> bool:
        self.plans.append(plan)
        return plan not in self.wrong


def searched(asked: Asked, *launches: dict[ChunkPlan, float], default: float = 100.0) -> Search:
    search = Search([SLOW, EVEN, FAST], asked)
    for times in launches:
        search.time_launch(default, times.__getitem__)
    return search


def test_the_fastest_plan_is_compared_once_and_the_others_never() -> None:
    asked = Asked()
    search = searched(asked, {FAST: 50.0, EVEN: 60.0, SLOW: 70.0})
    assert search.best() == search.best() == FAST
    assert asked.plans == [FAST]


def test_a_plan_that_is_wrong_is_never_the_best() -> None:
    asked = Asked(FAST)
    assert searched(asked, {FAST: 50.0, EVEN: 60.0, SLOW: 70.0}).best() == EVEN
    assert asked.plans == [FAST, EVEN]


def test_a_plan_that_is_slower_than_none_in_one_launch_is_not_the_best() -> None:
    first, second = {FAST: 10.0, EVEN: 60.0, SLOW: 70.0}, {FAST: 210.0, EVEN: 206.0, SLOW: 210.0}
    search = searched(Asked(), first)
    assert search.best() == FAST
    search.time_launch(200.0, second.__getitem__)
    assert search.ranked() == [FAST, EVEN, SLOW]
    assert search.best() == EVEN


def test_where_every_plan_is_slower_there_is_none() -> None:
    assert searched(Asked(), dict.fromkeys((FAST, EVEN, SLOW), 109.0)).best() is None


def test_a_few_microseconds_in_a_short_launch_put_no_plan_out() -> None:
    assert searched(Asked(), {FAST: 17.0, EVEN: 18.0, SLOW: 19.0}, default=9.5).best() == FAST
    assert searched(Asked(), {FAST: 17.0, EVEN: 18.0, SLOW: 19.0}, default=8.5).best() is None


def test_a_plan_that_can_not_run_is_out(capsys: pytest.CaptureFixture[str]) -> None:
    search = searched(Asked(), {EVEN: 60.0, SLOW: 70.0})
    assert search.best() == EVEN
    assert FAST not in search.took
    assert f"can't run: {FAST}" in capsys.readouterr().out


def test_the_table_keeps_what_it_says_of_others(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"another": {"a shape": asdict(SLOW)}}))
    join_table(table, "a GPU", "a shape", asdict(FAST))
    assert table_entry(table, "a GPU", "a shape") == asdict(FAST)
    join_table(table, "a GPU", "a shape", None)
    assert json.loads(table.read_text()) == {"another": {"a shape": asdict(SLOW)}}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_plans_whose_tiles_are_nearly_filled_by_groups(shape: str) -> None:
    heads, kv_heads, head_dim = SHAPES[shape]
    tried = list(plans(head_dim, 132))
    assert 6 <= len(tried) <= 38
    assert len(set(tried)) == len(tried)
    group = heads // kv_heads
    assert all(0 <= plan.lines - plan.tokens(group) * group < group <= plan.lines // 2 for plan in tried)
    assert {plan.parts for plan in tried} == {1, 8, 16}


def test_copies_compile_every_candidate_between_them(tmp_path: Path) -> None:
    names = [str(i) for i in range(7)]

    def compile_part(part: slice) -> None:
        for name in names[part]:
            (tmp_path / name).touch()

    assert compile_in_copies(compile_part, 3, 60.0) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_copy_that_fails_and_one_that_never_ends_are_named() -> None:
    def compile_part(part: slice) -> None:
        while part.start == 1:
            signal.pause()
        os._exit(3)

    assert compile_in_copies(compile_part, 2, 0.5) == [0, 1]


def test_a_copy_answers_for_a_process_that_may_not_touch_the_gpu() -> None:
    assert ask_a_copy(os.getpid) != os.getpid()
