"""What a rank other than the first does: enqueue the launches whose plans it finds. It decides nothing.

It holds no scheduler, no socket and no clock, and never reads a token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from runahead.cuda_graphs.device import Device, DeviceError
from runahead.runtime.plan import shape_of
from runahead.runtime.ranks.segment import LAUNCHED, Segment, pause_after

# See `pause_after`. A rank that has been idle for a second pauses longest: where a pause takes the system 0.2 ms, as in
# some sandboxes, it uses little more than 1 % of a core.
_PAUSES: Final = ((500, 100e-6), (1000, 2e-3), (math.inf, 15e-3))


def follow_launches(
    device: Device, segment: Segment, rank: int, launched: int = 0, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Enqueue each launch that rank 0 has published, in order, until the segment says stop. launched: the number that
    the first launch comes after.

    Raises DeviceError where a launch fails, and where a plan is another launch's.
    """
    rings, tries, done = device.rings, 0, launched
    while not segment.aborted:
        newest = int(segment.views.host[LAUNCHED])
        while done < newest:
            done, tries = done + 1, 0
            shape = shape_of(rings.plan[rings.slot(done)])
            if shape.number != done:
                raise DeviceError(f"rank {rank} found plan {shape.number} where plan {done} should be")
            device.launch(shape)
        device.ended()  # raises where a launch has failed
        tries += 1
        if pause := pause_after(tries, _PAUSES):
            sleep(pause)
