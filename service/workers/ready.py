"""A worker's first answer."""

from __future__ import annotations

import msgspec


class Ready(msgspec.Struct, frozen=True):
    """The answer to a worker's orders. unusable: why it can never answer, empty if it can. warning: missing
    confinement, empty if complete.
    """

    unusable: str = ""
    warning: str = ""
