"""`runahead kernels`: an engine is started as the service would start it, and ended once it is ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from runahead.runtime.log_output import LogOutput
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service import cli
from runahead.service.processes.children import EngineProcess, EngineStartError


class Engines:
    """Stands in for `EngineProcess.start`. fails: no engine can be started. exit_code: of those that are stopped."""

    def __init__(self) -> None:
        self.fails = False
        self.exit_code = 0
        self.started: list[tuple[EngineConfig, LogOutput]] = []
        self.stopped = 0

    async def start(self, config: EngineConfig, log: LogOutput) -> Engines:
        if self.fails:
            raise EngineStartError(2)
        self.started.append((config, log))
        return self

    async def stop(self, grace_s: float) -> int:
        self.stopped += 1
        return self.exit_code


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    engines = Engines()
    monkeypatch.setattr(EngineProcess, "start", engines.start)
    return engines


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint without weights."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    return tmp_path


def test_the_engine_starts_with_the_services_settings_but_for_its_weights_and_is_ended(
    engines: Engines, model: Path
) -> None:
    flags = ["--model", str(model), "--device", "cuda", "--max-rows", "8", "--kernel-cache", "/kernels"]
    assert cli.main(["kernels", *flags, "--log-level", "error"]) == 0
    ((config, log),) = engines.started
    assert (config.device, config.max_rows, config.kernel_cache) == ("cuda", 8, "/kernels")
    assert config.load_format == "dummy"
    assert log.level == "error"
    assert engines.stopped == 1


def test_without_a_device_kernels_are_compiled_for_the_gpu(
    engines: Engines, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RUNAHEAD__DEVICE")
    assert cli.main(["kernels", "--model", str(model)]) == 0
    ((config, _),) = engines.started
    assert config.device == "cuda"
    assert cli.main(["kernels", "--model", str(model), "--threads", "2"]) == 2
    assert "--threads (2) are the CPU device's and have no effect with --device cuda" in capsys.readouterr().err


def test_an_engine_that_can_not_start_or_fails_is_no_success(
    engines: Engines, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["kernels", "--model", str(model), "--device", "cuda"]
    engines.exit_code = 1
    assert cli.main(flags) == 2
    engines.fails = True
    assert cli.main(flags) == 2
    assert "runahead kernels: the engine could not start (exit code 2)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--device", "cpu"], "runahead kernels: --device cpu needs no kernels compiled; cuda does"),
        (
            ["--device", "cuda", "--max-rows", "1025"],
            "runahead kernels: --max-rows must be between 0 and 1024, and is 1025",
        ),
    ],
)
def test_settings_that_can_not_be_are_refused_before_anything_is_started(
    engines: Engines, model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    assert cli.main(["kernels", "--model", str(model), *flags]) == 2
    assert sentence in capsys.readouterr().err
    assert not engines.started


def test_a_folder_without_a_configuration_is_refused(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["kernels", "--model", str(tmp_path), "--device", "cuda"]) == 2
    assert "config.json" in capsys.readouterr().err
    assert not engines.started
