"""Decides which rows continue when KV blocks run out, and which row is evicted.

Rows are served in order: higher precedence first (the priority of a request whose caller may outrank others), then
protected rows, then callers in turns, each with its rows in queue order. So the last row is the youngest row of the
caller with the most rows.

The first row that can't be served pauses, and every later row that needs a block, so that small needs never
starve a large one. Pausing frees nothing. If fenced blocks do not cover the need, the last row is evicted once nothing
else could free any: every row waits, or the waiting row has a higher precedence than a row that does not.

A request is protected once it was evicted `MAX_EVICTIONS` times. It is then evicted only beside a row of a higher
precedence. Proof: let a protected row P be the victim, and no row have a higher precedence. The victim comes last of
all rows except the first waiting one, so these are protected too, with P's precedence. The first waiting row is no
exception: if it came after P, P would continue, and a continuing row is evicted only for a higher precedence. So all
rows are protected. The last of them was admitted when all of them fitted at their greatest length (`WaitingQueue`). So
any block that one of them lacks is fenced, and none is evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runahead.runtime.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Need:
    """Blocks that a row needs to continue."""

    request: Request
    blocks: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """Rows that must wait for blocks, in the order of service, and how many blocks the first of them lacks."""

    waiting: tuple[Request, ...]
    missing: int


ServiceKey = tuple[int, bool, int, int]


def order_of_service(rows: Sequence[Request]) -> dict[Request, ServiceKey]:
    """Return the sort key of each of these rows, which are all running rows."""
    rows_before = Counter[str]()
    keys: dict[Request, ServiceKey] = {}
    for request in sorted(rows, key=lambda request: request.queue_order):
        keys[request] = (-request.precedence, not request.is_protected, rows_before[request.caller], request.order)
        rows_before[request.caller] += 1
    return keys


def ration(needs: Sequence[Need], available: int, order: Mapping[Request, ServiceKey] | None = None) -> Shortage | None:
    """Serve `needs` in order from `available` blocks. Returns None if all are served. order: sort keys of all running
    rows; None: `needs` has all of them."""
    if sum(need.blocks for need in needs) <= available:
        return None
    keys = order or order_of_service([need.request for need in needs])
    ordered = sorted(needs, key=lambda need: keys[need.request])
    served = 0
    while ordered[served].blocks <= available:  # it ends, since the needs exceed the available blocks
        available -= ordered[served].blocks
        served += 1
    waiting = [need.request for need in ordered[served:] if need.blocks]
    return Shortage(tuple(waiting), ordered[served].blocks - available)


def choose_victim(shortage: Shortage, rows: Sequence[Request]) -> Request | None:
    """Return the row to evict, the last of all running rows; None while waiting is better."""
    first = shortage.waiting[0]
    others = [request for request in rows if request is not first]
    if not others:
        return None
    keys = order_of_service(rows)
    victim = max(others, key=lambda request: keys[request])
    all_wait = len(shortage.waiting) == len(rows)
    return victim if all_wait or victim.precedence < first.precedence else None
