"""Tokens that a request with a grammar may not say before it is long enough."""

from __future__ import annotations

from typing import Final

import msgspec


class Stops(msgspec.Struct, frozen=True, array_like=True):
    """Below position `min_position`, the masks of the request leave these tokens out: stop ids of its caller's.

    End-of-sequence tokens are not among them. Where a mask allows one of those and nothing else, the grammar is
    complete, and that end wins over the caller's minimum; where nothing is left but a stop of the caller's, nothing is.
    """

    token_ids: tuple[int, ...] = ()
    min_position: int = 0


NO_STOPS: Final = Stops()
