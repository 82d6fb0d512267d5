"""Who goes on when KV blocks run out, and who gives theirs up. Pure.

Rows are served by rank: higher priority first, then first come first served. The first that can't be served pauses, and
so does every row after it that needs a block, so that no small need starves a large one. Pausing frees nothing. If the
blocks that are coming back are not enough, a row is evicted once nothing else could free any: every row waits, or the
one that waits has a higher priority than a row that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from runtime.lifecycle import Request

# A request evicted so often is admitted again only when all rows fit at their longest; later ones of its priority are
# then evicted before it.
MAX_EVICTIONS: Final = 3


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
    for served, need in enumerate(ordered):
        if need.blocks > available:
            waiting = [other.request for other in ordered[served:] if other.blocks]
            return Shortage(tuple(waiting), need.blocks - available)
        available -= need.blocks
    raise AssertionError("the needs are more than what is available, and all are served")


def is_protected(request: Request) -> bool:
    """It was evicted as often as any request may be."""
    return request.evictions >= MAX_EVICTIONS


def choose_victim(shortage: Shortage, rows: Sequence[Request]) -> Request | None:
    """The row to evict, of all that hold blocks: the youngest of the lowest priority. None while waiting is better."""
    first = shortage.waiting[0]
    others = [request for request in rows if request is not first]
    if not others:
        return None
    victim = max(others, key=lambda request: (-request.priority, not is_protected(request), request.order))
    all_wait = len(shortage.waiting) == len(rows)
    return victim if all_wait or victim.priority < first.priority else None
