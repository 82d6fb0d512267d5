"""`runahead tune`: its process is told what to tune, and its end is the command's."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from runahead.runtime.checkpoint import BUNDLED_FOLDER
from runahead.runtime.process import tune
from runahead.runtime.wire.engine_config import EngineConfig, TuneOrder
from runahead.service import cli
from runahead.service.commands import engine_commands


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint without weights."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    return tmp_path


def test_the_process_gets_the_settings_the_rows_and_the_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders, code = list[TuneOrder](), 0

    def run(command: list[str], input: bytes, check: bool) -> Any:
        assert command[-1] == tune.__name__
        orders.append(msgspec.json.decode(input, type=TuneOrder))
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    flags = ["tune", "--model", str(model), "--device", "cuda", "--kernel-cache", "/kernels"]
    assert cli.main([*flags, "--rows", "8,1,8", "--seconds", "30"]) == 0
    (order,) = orders
    assert (order.config.kernel_cache, order.config.device) == ("/kernels", "cuda")
    assert (order.rows, order.seconds) == ((1, 8), 30)
    code = 2
    assert cli.main(flags) == 2 and orders[1].rows == (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize("rows", ["0", "65", "1,x", ""])
def test_numbers_of_rows_that_have_no_tilings_are_refused(
    model: Path, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", "--model", str(model), f"--rows={rows}"])
    assert ended.value.code == 2 and "must be numbers from 1 to 64, by commas" in capsys.readouterr().err


def test_a_cpu_has_nothing_to_tune(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--model", str(model), "--device", "cpu"]) == 2
    assert "runahead tune: --device cpu has no kernels to tune; cuda has" in capsys.readouterr().err


def test_without_a_gpu_the_process_says_so(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    order = msgspec.json.encode(TuneOrder(EngineConfig(model=str(model), device="cuda"), (1,), 1.0))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=SimpleNamespace(read=lambda: order)))
    assert tune.main() == 2
    assert "runahead tune: it needs a CUDA GPU, and torch finds none" in capfd.readouterr().err
    assert tune.__name__ == engine_commands.TUNE_MODULE


def test_a_model_whose_matrices_stay_in_fp8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = EngineConfig(model=str(BUNDLED_FOLDER), device="cuda", quantize="fp8", dtype="bfloat16")
    order = msgspec.json.encode(TuneOrder(config, (1,), 1.0))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=SimpleNamespace(read=lambda: order)))
    assert tune.main() == 2
    assert "stay quantized on a GPU, and products with them have fixed tilings" in capsys.readouterr().err
