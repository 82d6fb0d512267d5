"""What the engine's loop asks of whoever makes masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from runahead.runtime.wire.parameters import FinishReason


class Stops(msgspec.Struct, frozen=True, array_like=True):
    """Below position `min_position`, the masks of the request leave these tokens out: stop ids of its caller's.

    End-of-sequence tokens are not among them. Where a mask allows one of those and nothing else, the grammar is
    complete, and that end wins over the caller's minimum; where nothing is left but a stop of the caller's, nothing is.
    """

    token_ids: tuple[int, ...] = ()
    min_position: int = 0


NO_STOPS: Final = Stops()


class MaskFigures(NamedTuple):
    """What was done so far. Times are seconds.

    waiting: orders that are not carried out. masks, mask_s: written. compiled, compile_s: grammars. found: grammars
    that were there already. restarts: how often the worker was started again.
    """

    waiting: int = 0
    masks: int = 0
    mask_s: float = 0.0
    compiled: int = 0
    compile_s: float = 0.0
    found: int = 0
    restarts: int = 0


class GivenUp(NamedTuple):
    """A request that is followed no further. reason: how it ends."""

    order: int
    reason: FinishReason


class Masks:
    """Makes the mask of each row's next position, beside the loop. Nothing here ever blocks.

    A request is named by its `Request.order`. This one makes none: its engine takes no structured requests.
    """

    def open(self, order: int, grammar: str, stops: Stops = NO_STOPS) -> None:
        """A request is queued whose output has to fit this grammar. stops: tokens that it may not say for a while."""
        raise RuntimeError("a structured request was taken by an engine that makes no masks")

    def place(self, order: int, slot: int, epoch: int, tokens: NDArray[np.int32]) -> None:
        """It has a row, and these tokens, [n]: the masks of the position behind them and of those after it go to that
        slot, under this epoch."""
        raise RuntimeError("a structured request was given a row by an engine that makes no masks")

    def take(
        self, orders: NDArray[np.int64], tokens: NDArray[np.int32], drafts: int = 0, guesses: int = 0, *,
        soon: bool = False,
    ) -> None:  # fmt: skip
        """A launch was committed, and has brought each of these requests this token, and none of them its end. Several
        of a request come in their order. drafts: that the launch's F may have of each row; guesses: of these, those
        that its drafter may have made. soon: a launch behind it may have some, too. [n], [n]"""
        raise RuntimeError("a structured request got a token from an engine that makes no masks")

    def close(self, order: int) -> None:
        """The request has ended. One that was lost, or never opened, is passed over."""

    def look(self, now: float) -> Sequence[GivenUp]:
        """Requests that no masks will come for any more, each once: they are closed by that. now: seconds on the
        engine's clock. It is asked in every turn while there are requests that were opened and not closed."""
        return ()

    def figures(self) -> MaskFigures:
        """For `Stats`."""
        return MaskFigures()

    def stop(self) -> None:
        """No masks are wanted any more, of nobody."""
