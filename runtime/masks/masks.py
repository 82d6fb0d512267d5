"""The engine loop's interface to mask makers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from runahead.runtime.wire.parameters import FinishReason


class Stops(msgspec.Struct, frozen=True, array_like=True):
    """Tokens to mask below position `min_position`: the caller's stop ids.

    End-of-sequence tokens are not among them. If a mask allows only those, the grammar is complete, and its end
    overrides the caller's minimum; if only the caller's stops are left, nothing is.
    """

    token_ids: tuple[int, ...] = ()
    min_position: int = 0


NO_STOPS: Final = Stops()


class MaskFigures(NamedTuple):
    """Figures so far, which `EngineStats` names with the prefix `masks_`."""

    orders_waiting: int = 0
    written: int = 0
    written_s: float = 0.0
    grammars_compiled: int = 0
    grammars_compiled_s: float = 0.0
    grammars_known: int = 0
    restarts: int = 0


class GivenUp(NamedTuple):
    """A request that gets no more masks. reason: how it ends."""

    order: int
    reason: FinishReason


class Masks:
    """Makes the mask of each row's next position, beside the loop. Never blocks.

    A request is named by its `Request.order`. This base class makes none: its engine takes no structured requests.
    """

    def open(self, order: int, grammar: str, stops: Stops = NO_STOPS) -> None:
        """Open a queued request with this grammar. stops: tokens to mask below a position."""
        raise RuntimeError("a structured request was taken by an engine that makes no masks")

    def place(self, order: int, slot: int, epoch: int, tokens: NDArray[np.int32]) -> None:
        """Record the request's row and its tokens, [n]: masks from the next position on go to that slot, under this
        epoch.
        """
        raise RuntimeError("a structured request was given a row by an engine that makes no masks")

    def take(
        self, orders: NDArray[np.int64], tokens: NDArray[np.int32], drafts: int = 0, guesses: int = 0, *,
        soon: bool = False,
    ) -> None:  # fmt: skip
        """Record one token of each of these requests of a committed launch, none of which ended; a request's tokens in
        order. drafts: most drafts of a row in the launch's F; guesses: of these, the drafter's. soon: a later launch
        may have drafts. [n], [n]
        """
        raise RuntimeError("a structured request got a token from an engine that makes no masks")

    def close(self, order: int) -> None:
        """Close an ended request. Lost or unknown ones are ignored."""

    def given_up(self, now: float) -> Sequence[GivenUp]:
        """Return requests that will get no more masks, each once, which closes them. now: the engine's clock in
        seconds. Called in every turn with open requests.
        """
        return ()

    def figures(self) -> MaskFigures:
        """Return the figures for `Stats`."""
        return MaskFigures()

    def stop(self) -> None:
        """Stop making masks."""
