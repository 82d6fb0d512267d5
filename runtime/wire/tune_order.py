"""The order that `runahead tune` gives to the process that tunes."""

from __future__ import annotations

import msgspec

from runahead.runtime.wire.engine_config import EngineConfig


class TuneOrder(msgspec.Struct, frozen=True):
    """rows: of the decode launches that are tuned, each 1 to 64. seconds: no tiling is tried after so many."""

    config: EngineConfig
    rows: tuple[int, ...]
    seconds: float
