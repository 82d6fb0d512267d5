"""The command: which parts there are, what it refuses, and that a run is taken up where it ended."""

from __future__ import annotations

import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_table import __main__ as command
from benchmarks.gpu_table import parts, results
from benchmarks.gpu_table.cells import Run
from benchmarks.gpu_table.decode import Steps
from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.parts import PARTS, run_part
from benchmarks.gpu_table.published import GOALS_MS, MODEL_GOALS_MS, VLLM_MODELS_MS
from benchmarks.gpu_table.settings import read_settings
from benchmarks.gpu_table.shapes import SHAPES
from runahead.service.version import commit_of
from tests.benchmarks.gpu_table.sample_results import result


def test_every_part_is_listed_with_its_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PARTS)
    assert all(int(line.split()[1]) <= 8 for line in lines)
    of_shapes = {shape for shape in SHAPES for name in PARTS if name.endswith(f"-{shape}")}
    of_steps = {name.removeprefix("engine-") for name in PARTS if name.startswith("engine-")}
    assert GOALS_MS.keys() == of_steps - {"tiny"}
    assert of_shapes == SHAPES.keys() - {"tiny-experts", "tiny-halves", "tiny-hybrid"}, "which are one part"
    assert not any(part.is_wanted for name, part in PARTS.items() if "tiny" in name)


def test_each_model_with_experts_or_states_is_a_part_of_its_own_of_two_minutes() -> None:
    of_models = [part for name, part in PARTS.items() if name.startswith(("models-", "hybrids-"))]
    assert all(part.minutes <= 2 for part in of_models)
    for kind in ("models", "hybrids"):
        named = {name.removeprefix(f"{kind}-") for name in PARTS if name.startswith(f"{kind}-")} - {"tiny"}
        assert named == ({"30B-A3B", "7B-A1B"} if kind == "models" else {"8B-hybrid", "9B-hybrid", "40B-A3B-delta"})
    assert MODEL_GOALS_MS.keys() == {"30B-A3B", "7B-A1B"}
    assert VLLM_MODELS_MS.keys() == MODEL_GOALS_MS.keys()


def test_a_part_leaves_a_file_with_machine_versions_commit_date_and_settings(tmp_path: Path) -> None:
    found = run_part(PARTS["engine-tiny"], Run("cpu", 1, 300.0, "0123456789ab"))
    assert results.read(results.write(found, tmp_path)) == found
    assert found.commit == "0123456789ab" and found.date.endswith("Z") and found.machine.cores >= 1
    assert found.versions.torch == str(torch.__version__)
    assert {"repeats", "max_rows", "context_length", "run_ahead", "num_blocks"} <= found.settings.keys()
    ways = {(cell.rows, cell.way, cell.sampling) for cell in found.cells if cell.step_ms}
    assert len(ways) == len(found.cells) == 2 * 2 * 2 + 2
    assert not any(cell.skipped for cell in found.cells)


def test_models_are_measured_beside_the_floor_of_what_their_rows_need() -> None:
    found = run_part(PARTS["models-tiny"], Run("cpu", 1, 300.0, "0123456789ab"))
    assert [(cell.shape, cell.rows, cell.way) for cell in found.cells] == [
        (shape, rows, way)
        for shape in ("tiny-experts", "tiny-hybrid", "tiny-halves")
        for rows in (1, 4)
        for way in ("graph", "engine")
    ]
    for cells in (found.cells[:4], found.cells[4:8]):
        alone, together = cells[0], cells[-1]
        assert alone.experts == 2 and together.experts is not None and 2 <= together.experts <= 8
        assert alone.floor_ms < together.floor_ms
    assert {cell.experts for cell in found.cells[8:]} == {0.0}
    assert all(cell.step_ms for cell in found.cells)
    through = [cell for cell in found.cells if cell.way == "engine"]
    assert all(cell.launches and cell.not_one_graph is None for cell in through), "the CPU has no graphs"


def test_long_and_ragged_contexts_are_measured_by_the_same_code() -> None:
    found = run_part(PARTS["lengths-tiny"], Run("cpu", 1, 300.0, "0123456789ab"))
    assert all(cell.step_ms and cell.table == "lengths" for cell in found.cells)
    assert [cell.prompt for cell in found.cells] == ["40", "40", "90", "90", "8 to 70"]


def test_a_part_begins_no_figure_when_its_time_is_up_and_says_so() -> None:
    found = run_part(PARTS["lengths-tiny"], Run("cpu", 1, 0.0, "0123456789ab"))
    assert len(found.cells) == 5
    assert all(cell.step_ms is None and cell.skipped == "the part had run for 0 s" for cell in found.cells)


def test_a_figure_that_fails_is_named_the_others_are_measured_and_the_command_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = count(1)

    def measure(*arguments: Any) -> Steps:
        number = next(calls)
        if number == 2:
            raise BenchmarkError("it was too hot")
        return Steps(float(number))

    monkeypatch.setattr(parts, "through_the_engine", measure)
    assert command.main(["--part", "lengths-tiny", "--device", "cpu", "--out", str(tmp_path), *_commit()]) == 1
    assert "figures of the part lengths-tiny are missing: BenchmarkError: it was too hot" in capsys.readouterr().err
    cells = results.read(results.path_of("lengths-tiny", tmp_path)).cells
    assert [cell.step_ms for cell in cells] == [1.0, None, 3.0, 4.0, 5.0]
    assert [cell.skipped for cell in cells] == ["", "BenchmarkError: it was too hot", *[""] * 3]
    assert command.main(["--merge", "--out", str(tmp_path)]) == 0
    assert "- figures of lengths-tiny are missing: BenchmarkError: it was too hot" in capsys.readouterr().out


def test_kernels_are_not_traced_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--part", "kernels-tiny", "--device", "cpu", "--out", str(tmp_path)]
    assert command.main([*arguments, *_commit()]) == 1
    assert "this part needs a GPU" in capsys.readouterr().err


def _commit() -> list[str]:
    known = commit_of(results.ROOT)
    return [] if known else ["--commit", "0123456789ab"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--part", "engine-8B", "--out", str(tmp_path)]) == 1
    assert "torch finds no CUDA GPU here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_on_with_the_parts_that_have_no_result_of_this_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = [name for name, part in PARTS.items() if part.is_wanted]
    monkeypatch.setattr(results, "commit_of", lambda checkout: "0123456789ab")
    results.write(result(wanted[0]), tmp_path)
    results.write(result(wanted[1], commit="ffffffffffff"), tmp_path)
    results.write(result(wanted[2], failure="BenchmarkError: it was too hot"), tmp_path)
    started = []

    def run(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        assert arguments[:4] == [sys.executable, "-m", "benchmarks.gpu_table", "--part"]
        started.append(arguments[4])
        results.write(result(arguments[4]), tmp_path)
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert command.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    assert started == wanted[1:]
    assert f"Parts: {', '.join(sorted(wanted))}." in capsys.readouterr().out


def test_parts_of_a_kind_are_measured_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is there already is not measured again."""
    monkeypatch.setattr(results, "commit_of", lambda checkout: "0123456789ab")
    wanted = ["prompts-0.6B", "prompts-8B", "prompts-30B-A3B", "prompts-7B-A1B"]
    results.write(result("prompts-8B"), tmp_path)
    started = []

    def run(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        started.append(arguments[4])
        results.write(result(arguments[4]), tmp_path)
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert command.main(["--part", "prompts", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert started == [name for name in wanted if name != "prompts-8B"]
    assert f"Parts: {', '.join(sorted(wanted))}." in capsys.readouterr().out


def test_a_part_that_fails_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "commit_of", lambda checkout: "0123456789ab")
    monkeypatch.setattr(subprocess, "run", lambda arguments, **options: subprocess.CompletedProcess(arguments, 1))
    assert command.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "the part engine-0.6B failed" in capsys.readouterr().err


def test_settings_that_are_asked_for_reach_the_engine_and_the_file() -> None:
    asked = read_settings(["block_size=32", "prefix_cache=false"])
    assert asked == {"block_size": 32, "prefix_cache": False}
    found = run_part(PARTS["lengths-tiny"], Run("cpu", 1, 0.0, "0123456789ab", asked))
    assert found.settings["block_size"] == 32 and found.settings["asked"] == "block_size=32, prefix_cache=False"


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("blocksize=32", "the engine has no setting 'blocksize'"),
        ("block_size=many", "block_size must be a whole number"),
        ("max_rows=8", "every part decides max_rows by itself"),
    ],
)
def test_a_setting_that_can_not_be_is_refused_by_its_name(written: str, sentence: str) -> None:
    with pytest.raises(BenchmarkError, match=f"--set {written}: {sentence}"):
        read_settings([written])
