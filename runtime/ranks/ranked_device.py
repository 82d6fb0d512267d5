"""The device of rank 0: its own, and the ranks that follow it. The engine sees one device."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import NEVER, Device, DeviceError, LaunchShape
from runahead.cuda_graphs.rings import FAULT_NONE, STATUS_FAULT
from runahead.runtime.ranks.segment import ENDED, FAULT, FAULT_PEER, LAUNCHED, SAMPLED, TAIL, Segment

_PAUSE_S: Final = 200e-6  # between two looks at marks of other ranks, when rank 0's own have come


class Followers(Protocol):
    """The ranks 1 and up, threads or processes."""

    def sentinels(self) -> Sequence[int]:
        """Descriptors that become readable when a rank ends."""

    def lost(self) -> str:
        """Which rank has ended, and how, as a sentence; empty while all of them run."""

    def close(self) -> None:
        """End them. The segment has told them to stop."""


class RankedDevice:
    """`Device` over rank 0's own. Its tokens are rank 0's; a launch has ended when it has on every rank.

    own: writes its marks into the segment. followers: ended by `close`.
    """

    def __init__(self, own: Device, segment: Segment, followers: Followers, launched: int = 0) -> None:
        self.rings = own.rings
        self.counters = own.counters
        self.buckets, self.mixed_buckets, self.calls_at_once = own.buckets, own.mixed_buckets, own.calls_at_once
        self._own = own
        self._segment = segment
        self._followers = followers
        self._views = segment.views
        self._ended = launched

    def calls(self, shape: LaunchShape) -> int:
        return self._own.calls(shape)

    def launch(self, shape: LaunchShape) -> None:
        self._views.host[LAUNCHED] = shape.number  # the plan is there
        self._own.launch(shape)

    def sampled(self) -> int:
        newest = self._own.sampled()
        self._raise_fault()  # a rank that gave up wrote that before the mark
        return newest

    def ended(self) -> int:
        """See `Device.ended`. What the other ranks have left of launches that have ended is joined to rank 0's."""
        self._own.ended()
        least = self._least(ENDED)
        self._raise_fault()
        for number in range(self._ended + 1, least + 1):
            self._join(self.rings.slot(number))
        self._ended = least
        return least

    def in_tail(self) -> int:
        self._own.in_tail()
        least = self._least(TAIL)
        self._raise_fault()
        return least

    def wait(self, sampled: int, ended: int, wake_fds: Sequence[int], timeout_s: float, in_tail: int = NEVER) -> None:
        deadline = time.monotonic() + timeout_s
        fds = [*wake_fds, *self._followers.sentinels()]
        marks = self._views.words
        self._own.wait(sampled, ended, fds, timeout_s, in_tail)
        # Its own marks have come; have the others'?
        while marks[0, SAMPLED] > sampled or marks[0, TAIL] > in_tail or marks[0, ENDED] > ended:
            least = self._least(ENDED)
            left = deadline - time.monotonic()
            if min(int(marks[0, SAMPLED]), least + 1) > sampled or least > ended or left <= 0:
                return
            if self._least(TAIL) > in_tail:
                return
            if select.select(fds, [], [], min(_PAUSE_S, left))[0]:
                return

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        return self._own.read_rows()

    def close(self) -> None:
        self._own.close()
        self._segment.abort()
        self._followers.close()

    def _least(self, mark: int) -> int:
        return int(self._views.words[:, mark].min())

    def _join(self, slot: int) -> None:
        """A row is finite if it is on every rank, and a fault of any rank is the launch's."""
        views, status = self._views, self.rings.status
        np.minimum.reduce(views.finite[:, slot], axis=0, out=self.rings.finite[slot])
        faults = views.status[:, slot, STATUS_FAULT]
        if status[slot, STATUS_FAULT] == FAULT_NONE and faults.any():
            status[slot, STATUS_FAULT] = faults[faults != FAULT_NONE][0]

    def _raise_fault(self) -> None:
        if lost := self._followers.lost():
            self._segment.abort()  # what waits for it on a device ends
            raise DeviceError(lost)
        faults = self._views.words[:, FAULT]
        if faults.any():
            rank = int(faults.argmax())
            peer = int(self._views.words[rank, FAULT_PEER])
            raise DeviceError(f"rank {rank} has waited too long for rank {peer} in exchange {int(faults[rank])}")
