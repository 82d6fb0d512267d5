"""The order from `runahead tune` to the tuning process."""

from __future__ import annotations

import msgspec

from runahead.runtime.wire.engine_config import EngineConfig


class TuneOrder(msgspec.Struct, frozen=True):
    """What to tune. rows: of decode launches, each 1 to 64. seconds: no further tiling is tried after this time."""

    config: EngineConfig
    rows: tuple[int, ...]
    seconds: float
