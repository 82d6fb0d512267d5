"""The part that times several ranks beside one, on a tiny model."""

from __future__ import annotations

import pytest

from benchmarks.gpu_table import rank_parts
from benchmarks.gpu_table.cells import Run
from benchmarks.gpu_table.floors import step_bytes
from benchmarks.gpu_table.shapes import SHAPES


def test_two_ranks_and_one_are_timed_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_parts, "FIRST", (100, 300))
    found = rank_parts.rank_part(SHAPES["tiny"], 2, Run("cpu", 1, 300.0, "0123456789ab"))
    assert not found.failures
    names = ("tiny tp2", "tiny tp1")
    assert [(cell.shape, cell.rows) for cell in found.cells] == [(name, rows) for name in names for rows in (1, 4)]
    assert all(cell.step_ms and cell.overlap for cell in found.cells)
    assert [2 * cell.floor_ms for cell in found.cells[:2]] == [cell.floor_ms for cell in found.cells[2:]]
    assert [(first.shape, first.tokens) for first in found.prompts] == [
        (name, tokens) for name in names for tokens in (100, 300)
    ]
    assert all(first.first_token_ms for first in found.prompts)
    assert found.settings["tensor_parallel"] == 2
    assert all(cell.experts is None for cell in found.cells)


def test_floors_of_ranks_alone_count_the_experts_that_rows_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_parts, "FIRST", (100,))
    shape, ranks = SHAPES["tiny-experts"], 2
    found = rank_parts.rank_part(shape, ranks, Run("cpu", 1, 300.0, "0123456789ab", ranks_only=True))
    assert not found.failures and {cell.shape for cell in found.cells} == {"tiny-experts tp2"}
    config = shape.described()
    bytes_ = step_bytes(config, config.dtype)
    one, several = found.cells
    assert one.experts == 2 and several.experts is not None and 2 < several.experts < 8
    for cell in found.cells:
        assert cell.experts is not None
        whole_ms = bytes_.floor_ms(cell.rows * cell.context, cell.experts, cell.rows)
        assert cell.floor_ms == pytest.approx(whole_ms / ranks)
