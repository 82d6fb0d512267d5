"""When the tokens of each request came, of what an engine has published, and what lay between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Came: TypeAlias = Sequence[tuple[float, NDArray[np.int64]]]  # seconds, and of which handles a token came then


def times_of(came: Came, but_for: Collection[int] = ()) -> dict[int, list[float]]:
    """When each token came, by handle. but_for: handles that do not count."""
    found: dict[int, list[float]] = {}
    for at, handles in came:
        for handle in handles.tolist():
            if handle not in but_for:
                found.setdefault(handle, []).append(at)
    return found


def gaps_in(times: Iterable[Sequence[float]]) -> list[float]:
    """Seconds between two tokens of the same request. times: of each request."""
    return [after - before for one in times for before, after in pairwise(one)]
