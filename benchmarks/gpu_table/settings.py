"""With which settings the engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.gpu_table.errors import BenchmarkError
from runahead.runtime.wire.engine_config import DeviceName, EngineSettings
from runahead.runtime.wire.setting import settings_of

Settings = dict[str, int | float | str | bool]

RUN_AHEAD: Final = 2  # the service's default for weights of less than 8 GiB
_OURS: Final = frozenset({"load_format", "device", "max_rows", "run_ahead", "num_blocks"})  # which a part decides


def engine_settings(device: DeviceName, max_rows: int, context: int) -> Settings:
    """Return the settings that differ from the service's defaults, by name. Prompts are admitted fast; no decode step
    depends on that."""
    return {
        "load_format": "dummy",
        "device": device,
        "max_rows": max_rows,
        "context_length": context,
        "prefill_chunk": 512,
        "max_prefill_tokens": 8192,
        "run_ahead_tokens": 1 << 20,
    }


def read_settings(written: Sequence[str]) -> Settings:
    """Settings of the engine as somebody has written them, each `name=value`.

    Raises BenchmarkError for one that is unknown or invalid, or that the benchmark decides.
    """
    known, found = settings_of(EngineSettings), Settings()
    for one in written:
        name, _, value = one.partition("=")
        if name not in known:
            raise BenchmarkError(f"--set {one}: the engine has no setting {name!r}")
        if name in _OURS:
            raise BenchmarkError(f"--set {one}: every part decides {name} by itself")
        try:
            read: Any = known[name].read(value, strict=False)
        except ValueError as error:
            raise BenchmarkError(f"--set {one}: {name} {error}") from error
        found[name] = read
    return found
