"""The script that makes the table of what exact kernels cost, on the CPU, where both ways are the same kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_table.shapes import SHAPES
from benchmarks.tune import exact
from runahead.runtime.kernels.triton.exactness import measured_ratios, shape_key
from runahead.runtime.models.weights import described


@pytest.fixture
def tiny_key() -> str:
    import torch

    config = SHAPES["tiny"].described()
    return shape_key(described(config).layers, config.vocab_size, torch.float32)


def test_every_bucket_of_a_shape_joins_the_table_and_nothing_leaves_it(tmp_path: Path, tiny_key: str) -> None:
    out = tmp_path / "table.json"
    out.write_text(json.dumps({"a GPU": {"a model": {"1": 1.5}}, "cpu": {tiny_key: {"3": 1.25, "1": 9.0}}}))
    exact.main(["--models", "tiny", "--device", "cpu", "--max-rows", "2", "--rounds", "1", "--out", str(out)])
    assert measured_ratios("a GPU", "a model", out) == {1: 1.5}
    found = measured_ratios("cpu", tiny_key, out)
    assert list(found) == [1, 2, 3]
    assert found[3] == 1.25
    assert 0 < found[1] < 9.0 and found[2] > 0, "measured anew, and measured"


def test_a_folder_s_shape_is_that_of_its_model(tmp_path: Path) -> None:
    SHAPES["tiny"].write(tmp_path)
    assert exact._shape(str(tmp_path)).described() == SHAPES["tiny"].described()


def test_nothing_is_begun_when_the_time_is_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    exact.main(["--models", "tiny", "--device", "cpu", "--seconds", "-1", "--out", str(out)])
    assert not out.exists()
    assert "tiny: the time is up" in capsys.readouterr().err


def test_figures_of_a_cpu_do_not_join_the_kernels_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        exact.main(["--models", "tiny", "--device", "cpu"])
    assert "its figures belong into no table" in capsys.readouterr().err
