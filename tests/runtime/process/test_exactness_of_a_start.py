"""Whether it is exact is decided once at a start, before the weights are read, and said in the log and to clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from runahead.runtime import models
from runahead.runtime.process import cuda
from runahead.runtime.process.assemble import assemble
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig
from tests.runtime.process.test_captures_logged import a_gpu_on_the_cpu

__all__ = ["a_gpu_on_the_cpu"]  # a fixture

BUNDLED = Path(models.__path__[0]) / "bundled"


def started(**settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the engine's info and its one line in the log say."""
    base: dict[str, Any] = {"model": str(BUNDLED), "device": "cpu", "max_rows": 4, "context_length": 256}
    with capture_logs() as events:
        parts = assemble(EngineConfig(**(base | settings)), lambda done, total: None)
    (said,) = [event for event in events if event["event"] == "exactness"]
    found = parts.info.exactness
    if settings.get("device") != "cuda":
        parts.device.close()
    return {"exact": found.exact, "why": found.why}, dict(said)


def said_before_ranks_start(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> dict[str, Any]:
    """The line of the log. The start ends where it would start ranks."""

    class Begun(Exception):
        pass

    def begin(*parts: Any) -> None:
        raise Begun

    monkeypatch.setattr(cuda, "start_ranks", begin)
    with capture_logs() as events, pytest.raises(Begun):
        assemble(EngineConfig(model=str(BUNDLED), device="cuda", **settings), lambda done, total: None)
    (said,) = [event for event in events if event["event"] == "exactness"]
    return dict(said)


@pytest.mark.parametrize("asked", ["auto", "on", "off"])
def test_on_the_cpu_it_is_exact_whatever_is_asked_for(asked: str) -> None:
    found, said = started(exact=asked, threads=1)
    assert found == {
        "exact": True,
        "why": "on the CPU there are no other kernels, whatever is asked for",
    }
    assert said == {**found, "asked": asked, "event": "exactness", "log_level": "info"}


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
@pytest.mark.parametrize(("asked", "exact"), [("auto", False), ("on", True), ("off", False)])
def test_on_a_gpu_the_kernels_are_those_that_were_chosen(
    monkeypatch: pytest.MonkeyPatch, asked: str, exact: bool
) -> None:
    taken: list[bool] = []
    monkeypatch.setattr(cuda, "gpu_kernels", taken.append)
    found, said = started(device="cuda", exact=asked)
    assert taken == [exact] == [found["exact"]] == [said["exact"]]
    assert said["why"] == found["why"] != ""


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_exact_in_float32_is_refused_on_a_gpu_before_the_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "load_model", lambda *parts: pytest.fail("the weights were read"))
    with pytest.raises(ConfigError, match=r"--exact on can't be: the exact kernels are for bfloat16, and"):
        started(device="cuda", dtype="float32", exact="on", spelled={"exact": "--exact"})


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_ranks_on_gpus_have_exact_kernels_or_are_refused_before_any_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    said = said_before_ranks_start(monkeypatch, tensor_parallel=2)
    assert said["exact"] and said["why"] == "tensor-parallel ranks have no other kernels"
    monkeypatch.setattr(cuda, "start_ranks", lambda *parts: pytest.fail("ranks were started"))
    with pytest.raises(ConfigError, match=r"tensor_parallel 2 can't be: the exact kernels are for bfloat16, and"):
        started(device="cuda", dtype="float32", tensor_parallel=2)


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_where_exact_kernels_can_not_be_and_nobody_asks_the_start_goes_on_without() -> None:
    found, _ = started(device="cuda", dtype="float32")
    assert found["exact"] is False
    assert "served in float32" in found["why"]


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_fp8_weights_have_exact_kernels_alone_on_every_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for ranks, why in ((1, "products with quantized weights"), (2, "tensor-parallel ranks")):
        said = said_before_ranks_start(monkeypatch, quantize="fp8", tensor_parallel=ranks)
        assert said["exact"] and said["why"].startswith(why)
    monkeypatch.setattr(cuda, "start_ranks", lambda *parts: pytest.fail("ranks were started"))
    with pytest.raises(ConfigError, match=r"--exact off can't be combined with quantized weights"):
        started(device="cuda", quantize="fp8", exact="off", spelled={"exact": "--exact"})
