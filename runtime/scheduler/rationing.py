"""Who goes on when KV blocks run out, and who gives theirs up.

Rows are served in order: higher precedence first, which is the priority of a request whose caller may outrank others;
of equals those that are protected; of equals callers take turns, each with its rows by rank. So the row that comes last
is the youngest one of the caller that holds most.

The first that can't be served pauses, and so does every row after it that needs a block, so that no small need starves
a large one. Pausing frees nothing. If the blocks that are coming back are not enough, the row that comes last is
evicted once nothing else could free any: every row waits, or the one that waits has a higher precedence than a row that
does not.

A request is protected once it was evicted `MAX_EVICTIONS` times. It is then evicted only beside a row of a higher
precedence, and here is why. Say that a protected row P is the victim and that no row has a higher precedence. Of all
rows but the first that waits, the victim comes last, so that these are protected too and of P's precedence. The first
that waits is no exception: if it came behind P, P would go on, and a row that goes on is evicted only for a higher
precedence. So all rows are protected. The last of them to be admitted was admitted when everything that all of
them may become fitted (`WaitingQueue`). What one of them lacks is therefore coming, and nobody is evicted for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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


ServiceKey = tuple[int, bool, int, int]


def order_of_service(rows: Sequence[Request]) -> dict[Request, ServiceKey]:
    """What these rows, all that run, are sorted by."""
    places = Counter[str]()
    keys: dict[Request, ServiceKey] = {}
    for request in sorted(rows, key=lambda request: request.rank):
        keys[request] = (-request.precedence, not request.is_protected, places[request.caller], request.order)
        places[request.caller] += 1
    return keys


def ration(needs: Sequence[Need], available: int, order: Mapping[Request, ServiceKey] | None = None) -> Shortage | None:
    """Serve `needs` in order from `available` blocks. None if all are served. order: of all that run; None: these
    are."""
    if sum(need.blocks for need in needs) <= available:
        return None
    keys = order or order_of_service([need.request for need in needs])
    ordered = sorted(needs, key=lambda need: keys[need.request])
    served = 0
    while ordered[served].blocks <= available:  # it ends: the needs are more than what is available
        available -= ordered[served].blocks
        served += 1
    waiting = [need.request for need in ordered[served:] if need.blocks]
    return Shortage(tuple(waiting), ordered[served].blocks - available)


def choose_victim(shortage: Shortage, rows: Sequence[Request]) -> Request | None:
    """The row to evict, of all that run: the one that comes last. None while waiting is better."""
    first = shortage.waiting[0]
    others = [request for request in rows if request is not first]
    if not others:
        return None
    keys = order_of_service(rows)
    victim = max(others, key=lambda request: keys[request])
    all_wait = len(shortage.waiting) == len(rows)
    return victim if all_wait or victim.precedence < first.precedence else None
