"""Device auto: a GPU that works, else the CPU, and the log says which and why."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from runahead.runtime.checkpoint import BUNDLED_FOLDER
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.device_choice import with_device
from runahead.runtime.wire.engine_config import ConfigError, DeviceName, EngineConfig


def has_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), **lacks: bool) -> None:
    """A machine with a GPU on which the one tried operation succeeds: it runs on the CPU instead."""
    ones = torch.ones
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: not lacks.get("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not lacks.get("gpu"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if lacks.get("triton") else name)

    def tried(*shape: int, device: torch.device | None = None) -> torch.Tensor:
        if lacks.get("life") and device is not None:
            raise RuntimeError("CUDA error: uncorrectable ECC error\nCUDA kernel errors might be reported later")
        return ones(*shape)

    monkeypatch.setattr(torch, "ones", tried)


def chosen(**settings: Any) -> tuple[DeviceName, dict[str, Any]]:
    """The device of a start with `auto`, and its line in the log."""
    with capture_logs() as events:
        device = with_device(EngineConfig(model="any", **settings)).device
    (said,) = events
    return device, dict(said)


def test_auto_is_the_default_and_takes_a_gpu_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpu(monkeypatch)
    device, said = chosen(dtype="bfloat16", kernel_cache="/kernels")
    assert device == "cuda"
    assert said == {"event": "device", "asked": "auto", "device": "cuda", "why": "a GPU", "log_level": "info"}


@pytest.mark.parametrize(
    ("lacks", "why"),
    [
        ({"cuda": True}, "torch is built without CUDA"),
        ({"gpu": True}, "torch finds no CUDA GPU"),
        ({"triton": True}, "triton is not installed"),
        ({"capability": (7, 5)}, "the kernels need a GPU of compute capability 8.0 or more"),
        ({"life": True}, "the GPU fails: CUDA error: uncorrectable ECC error"),
    ],
)
def test_auto_takes_the_cpu_where_no_gpu_works_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, lacks: dict[str, Any], why: str
) -> None:
    has_gpu(monkeypatch, **lacks)
    device, said = chosen(threads=1)
    assert device == "cpu"
    assert said["why"].startswith(why)
    assert "\n" not in said["why"]


@pytest.mark.parametrize(
    ("lacks", "settings", "sentence"),
    [
        ({}, {"threads": 2}, r"^--device auto has found cuda \(a GPU\): .*threads \(2\) are the CPU device's"),
        (
            {"gpu": True},
            {"dtype": "bfloat16"},
            r"^--device auto has found cpu \(torch finds no CUDA GPU\): --device cpu computes in float32; dtype bfloat",
        ),
        ({"gpu": True}, {"kernel_cache": "/kernels"}, "has found cpu .* kernel_cache must be empty with --device cpu"),
    ],
)
def test_what_contradicts_the_device_that_was_found_is_refused_by_both_names(
    monkeypatch: pytest.MonkeyPatch, lacks: dict[str, Any], settings: dict[str, Any], sentence: str
) -> None:
    has_gpu(monkeypatch, **lacks)
    with pytest.raises(ConfigError, match=sentence):
        chosen(spelled={"device": "--device"}, **settings)


def test_a_device_that_was_named_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("a GPU was looked for"))
    for device in ("cpu", "cuda"):
        config = EngineConfig(model="any", device=device)
        assert with_device(config) is config


def test_an_engine_that_found_its_device_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpu(monkeypatch, gpu=True)
    parts = assemble(EngineConfig(model=str(BUNDLED_FOLDER), max_rows=4, num_blocks=200), lambda *_: None)
    parts.device.close()
    assert (parts.info.device, parts.info.dtype) == ("cpu", "float32")
