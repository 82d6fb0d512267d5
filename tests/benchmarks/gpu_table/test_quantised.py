"""The part that times quantized weights beside 16 bits, on a tiny model."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu_table import results
from benchmarks.gpu_table.cells import Run
from benchmarks.gpu_table.merge import merge_folder
from benchmarks.gpu_table.parts import PARTS, run_part
from benchmarks.gpu_table.tables import tables


def test_a_model_is_timed_in_16_bits_and_in_fp8_in_one_run(tmp_path: Path) -> None:
    found = run_part(PARTS["quantised-tiny"], Run("cpu", 1, 300.0, "0123456789ab"))
    assert not found.failure
    assert [(cell.shape, cell.rows, cell.way) for cell in found.cells] == [
        (shape, rows, way) for shape in ("tiny", "tiny fp8") for rows in (1, 4) for way in ("graph", "engine")
    ]
    assert all(cell.step_ms for cell in found.cells)
    plain, quantized = found.cells[0].floor_ms, found.cells[4].floor_ms
    assert quantized < plain, "of fewer bytes"
    results.write(found, tmp_path)
    shown = tables(merge_folder(tmp_path))
    assert "| tiny fp8 | 1 |" in shown and "| tiny | 4 |" in shown
