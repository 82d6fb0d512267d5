"""Front ends take turns at being heard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Lane = TypeVar("Lane")
Said = TypeVar("Said")


class Turns(Generic[Lane]):
    """Who may speak, in the order of their turns, and who is gone.

    lanes: by front end, whatever its messages are taken from. A new one comes last. gone: front ends of which the next
    message is that they are gone; they are heard of before the others.
    """

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self.gone: deque[int] = deque()

    def take(
        self, next_of: Callable[[int, Lane], Said | None], has_more: Callable[[Lane], bool]
    ) -> Iterator[tuple[int, Said | None]]:
        """One message of each front end in turn, for as long as there are any, and (front end, None) for who is gone.

        Whoever has had its turn goes behind the others, also for the next call, which may come before all had theirs.

        next_of: takes the next message of a front end, by its number and lane; None where there is none. It may remove
        lanes, and say who is gone. has_more: whether a lane may have another message now.
        """
        left = list(self.lanes.items())
        while left or self.gone:
            while self.gone:
                yield self.gone.popleft(), None
            for owner, lane in left:
                said = next_of(owner, lane)
                if said is not None:
                    self.lanes[owner] = self.lanes.pop(owner)
                    yield owner, said
            left = [(owner, lane) for owner, lane in left if has_more(lane)]
