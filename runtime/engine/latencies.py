"""How long requests wait: for a row, for the first token, from each token to the next, and for their end."""

from __future__ import annotations

import numpy as np

from runahead.runtime.scheduler.outcomes import Commit
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.wire.histogram import Histogram


class Latencies:
    """Times are seconds on the engine's clock, up to when a launch's tokens are sent.

    `inter_token` has a time for every token but the first of each request: since the request's token before, whatever
    came between (a pause, an eviction, a launch that others filled). The tokens that one launch brings of a row come
    together: the first of them has waited, the others have not, so that a request's times add up to the time between
    its first token and its last. drafts: a launch may bring several tokens of a row.
    `queue` has one for each request that was given a row, `end_to_end` for each that has ended with a token, however it
    did, unless its client went away.
    """

    def __init__(self, rows: Rows, drafts: int) -> None:
        self.first_token = Histogram()
        self.inter_token = Histogram()
        self.queue = Histogram()
        self.end_to_end = Histogram()
        self._rows = rows
        self._drafts = drafts

    def tokens(self, commit: Commit, has_firsts: bool, now: float) -> None:
        """A launch's tokens are sent. has_firsts: some are the first ones of their requests."""
        if not commit.slots.size:
            return
        since = self._rows.token_times.advance(commit.slots, now)
        if isinstance(since, float) and not has_firsts and not self._drafts:
            self.inter_token.add(since, commit.slots.size)
            return
        waited = np.full(commit.slots.size, since) if isinstance(since, float) else since
        if self._drafts:
            waited[1:][commit.slots[1:] == commit.slots[:-1]] = 0.0
        self.inter_token.add_each(waited[~commit.firsts] if has_firsts else waited)
