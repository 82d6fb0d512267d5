"""The part that times quantized weights beside 16 bits, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu_table import results
from benchmarks.gpu_table.cells import Run
from benchmarks.gpu_table.floors import step_bytes
from benchmarks.gpu_table.merge import merge_folder
from benchmarks.gpu_table.parts import PARTS, run_part
from benchmarks.gpu_table.shapes import SHAPES
from benchmarks.gpu_table.tables import tables
from runahead.runtime.models.memory import FP8_KV

FORMS = {"quantised-tiny": ("tiny", "tiny fp8"), "quantised-more-tiny": ("tiny int4", "tiny fp8, fp8 kv")}


def test_a_model_is_timed_in_16_bits_in_fp8_in_int4_and_with_fp8_keys_and_values(tmp_path: Path) -> None:
    floors = []
    for part, shapes in FORMS.items():
        found = run_part(PARTS[part], Run("cpu", 1, 300.0, "0123456789ab"))
        assert not found.failure
        assert [(cell.shape, cell.rows, cell.way) for cell in found.cells] == [
            (shape, rows, way) for shape in shapes for rows in (1, 4) for way in ("graph", "engine")
        ]
        assert all(cell.step_ms for cell in found.cells)
        floors += [found.cells[0].floor_ms, found.cells[4].floor_ms]
        results.write(found, tmp_path)
    plain, fp8, int4, fp8_with_kv = floors
    assert int4 < fp8 < plain and fp8_with_kv < fp8, "of fewer bytes"
    shown = tables(merge_folder(tmp_path))
    assert all(f"| {shape} | {rows} |" in shown for shapes in FORMS.values() for shape in shapes for rows in (1, 4))


def test_the_floors_of_int4_and_of_fp8_keys_and_values_are_those_of_their_bytes() -> None:
    """8B, with 672 tokens a row."""
    config = SHAPES["8B"].described()
    int4 = step_bytes(config, torch.bfloat16, "int4")
    fp8, with_kv = (step_bytes(config, torch.bfloat16, "fp8", kv) for kv in (None, FP8_KV))
    assert [int4.floor_ms(672 * rows) for rows in (1, 8, 64)] == pytest.approx([1.03, 1.16, 2.24], abs=0.05)
    assert [with_kv.floor_ms(672 * rows) for rows in (8, 64)] == pytest.approx([1.83, 2.36], abs=0.02)
    assert (with_kv.weights, 2 * with_kv.kv_token) == (fp8.weights, fp8.kv_token)
