"""Who goes on when KV blocks run out, and who gives theirs up.

Rows are served by rank: higher priority first, of equals those that are protected, then first come first served. The
first that can't be served pauses, and so does every row after it that needs a block, so that no small need starves a
large one. Pausing frees nothing. If the blocks that are coming back are not enough, the row of the worst rank is
evicted once nothing else could free any: every row waits, or the one that waits has a higher priority than a row that
does not.

A request is protected once it was evicted `MAX_EVICTIONS` times. It is then evicted only beside a row of a higher
priority, and here is why. Say that a protected row P is the victim and that no row has a higher priority. Of all rows
but the first that waits, the victim has the worst rank, so that these are protected too and of P's priority. The first
that waits is no exception: if its rank were worse than P's, P would go on, and a row that goes on is evicted only for a
higher priority. So all rows are protected. The last of them to be admitted was admitted when everything that all of
them may become fitted (`WaitingQueue`). What one of them lacks is therefore coming, and nobody is evicted for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runahead.runtime.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Need:
    """Blocks that a row needs to go on."""

    request: Request
    blocks: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """Rows that must wait for blocks, the best ranked first, and how many the first of them lacks."""

    waiting: tuple[Request, ...]
    missing: int


def ration(needs: Sequence[Need], available: int) -> Shortage | None:
    """Serve `needs` by rank from `available` blocks. None if all are served."""
    if sum(need.blocks for need in needs) <= available:
        return None
    ordered = sorted(needs, key=lambda need: need.request.rank)
    served = 0
    while ordered[served].blocks <= available:  # it ends: the needs are more than what is available
        available -= ordered[served].blocks
        served += 1
    waiting = [need.request for need in ordered[served:] if need.blocks]
    return Shortage(tuple(waiting), ordered[served].blocks - available)


def choose_victim(shortage: Shortage, rows: Sequence[Request]) -> Request | None:
    """The row to evict, of all that hold blocks: the one of the worst rank. None while waiting is better."""
    first = shortage.waiting[0]
    others = [request for request in rows if request is not first]
    if not others:
        return None
    victim = max(others, key=lambda request: request.rank)
    all_wait = len(shortage.waiting) == len(rows)
    return victim if all_wait or victim.priority < first.priority else None
