"""A worker's first answer."""

from __future__ import annotations

import msgspec


class Ready(msgspec.Struct, frozen=True):
    """The answer to a worker's orders. unusable: why it can answer no question, ever; empty: it can. warning: what is
    missing of its confinement; empty: nothing."""

    unusable: str = ""
    warning: str = ""
