"""Every start is exact, and says so to clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runahead.runtime import models
from runahead.runtime.process import cuda
from runahead.runtime.process.assemble import assemble
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig
from runahead.runtime.wire.messages import Exactness
from tests.runtime.process.test_captures_logged import a_gpu_on_the_cpu

__all__ = ["a_gpu_on_the_cpu"]  # a fixture

BUNDLED = Path(models.__path__[0]) / "bundled"


def exactness_of_a_start(**settings: Any) -> Exactness:
    base: dict[str, Any] = {"model": str(BUNDLED), "max_rows": 4, "context_length": 256}
    parts = assemble(EngineConfig(**(base | settings)), lambda done, total: None)
    if settings["device"] == "cpu":
        parts.device.close()
    return parts.info.exactness


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
@pytest.mark.parametrize(("device", "dtype"), [("cpu", "auto"), ("cuda", "auto"), ("cuda", "float32")])
def test_every_start_says_that_it_is_exact(device: str, dtype: str) -> None:
    said = exactness_of_a_start(device=device, dtype=dtype, threads=int(device == "cpu"))
    assert said == Exactness(True, "no order of sums depends on the rows beside a completion")


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_ranks_on_gpus_are_refused_in_another_dtype_before_anything_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("start_ranks", "load_model"):
        monkeypatch.setattr(cuda, name, lambda *parts: pytest.fail("it was begun"))
    with pytest.raises(ConfigError, match=r"^tensor_parallel 2 can't be: ranks on GPUs exchange sums in bfloat16, and"):
        exactness_of_a_start(device="cuda", dtype="float32", tensor_parallel=2)
