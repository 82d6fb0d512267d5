"""Messages of a service whose counters began elsewhere than at 0, as if they had not; and the other way round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from runahead.runtime.engine.figures import Snapshot
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.figures import EngineStats
from runahead.runtime.wire.kv_events import KvQuery, KvReply


@dataclass(frozen=True, slots=True)
class Begun:
    """The numbers that the first launch, handle, call and front end come after."""

    launches: int = 0
    handles: int = 0
    calls: int = 0
    owners: int = 0

    def shifted(self, owner: int, message: m.ToEngine | None) -> tuple[int, m.ToEngine | None]:
        """What a front end says that counts from 0, as one says it that began here. None: it is gone."""
        changes: dict[str, int] = {}
        if isinstance(message, m.Submit | m.Cancel):
            changes = {"handle": message.handle + self.handles}
        elif isinstance(message, m.Abort | m.StatsQuery | m.TraceQuery | KvQuery):
            changes = {"call": message.call + self.calls}
        return owner + self.owners, message and msgspec.structs.replace(message, **changes)

    def from_zero(self, owner: int, message: m.ToFrontEnd) -> tuple[int, m.ToFrontEnd]:
        """What an engine that began here says, as one says it that began at 0."""
        changes: dict[str, Any] = {}
        if isinstance(message, m.Output):
            handles = np.frombuffer(message.handles, np.int64) - self.handles
            ends = (msgspec.structs.replace(end, handle=end.handle - self.handles) for end in message.finished)
            changes = {"handles": handles.tobytes(), "finished": tuple(ends)}
            changes["launch"] = message.launch and message.launch - self.launches  # 0: an end between two launches
        elif isinstance(message, m.StatsReply):
            changes = {"call": message.call - self.calls, "stats": self.stats(message.stats)}
        elif isinstance(message, m.AbortResult | m.TraceReply | KvReply):
            changes = {"call": message.call - self.calls}
        elif not isinstance(message, m.Welcome | m.Heartbeat | m.Failed):
            changes = {"handle": message.handle - self.handles}
        return owner - self.owners, msgspec.structs.replace(message, **changes)

    def stats(self, stats: EngineStats) -> EngineStats:
        """Differences since the start. All but the launches count from 0 anyway."""
        return msgspec.structs.replace(stats, launches=stats.launches - self.launches)

    def snapshot(self, snapshot: Snapshot) -> Snapshot:
        """As logged by an engine that began at 0."""
        values = {name: getattr(snapshot, name) for name in snapshot.__slots__}
        return Snapshot(**{**values, "launch": snapshot.launch - self.launches})
