"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A match: the string `stop` ends before character `end` of the text."""

    stop: str
    end: int

    @property
    def start(self) -> int:
        return self.end - len(self.stop)


class StopMatcher:
    """Finds the stop string that completes first, and the longer of two that complete at the same character.

    Uses an automaton of Knuth, Morris and Pratt for each string: amortized constant time a character, however the text
    is cut. The state is the length of the string's prefix that the text ends with.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        # Longest first, so the first match at a character is the longest.
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._states = [0] * len(stops)
        self._seen = 0  # characters

    @property
    def held(self) -> int:
        """The number of last characters that may begin a stop string."""
        return max(self._states, default=0)

    def feed(self, text: str) -> StopMatch | None:
        """Return the first match that `text` completes. Feed nothing after a match."""
        for character in text:
            self._seen += 1
            for which, stop in enumerate(self._stops):
                state, fallbacks = self._states[which], self._fallbacks[which]
                while state and stop[state] != character:
                    state = fallbacks[state - 1]
                if stop[state] == character:
                    state += 1
                if state == len(stop):
                    return StopMatch(stop, self._seen)
                self._states[which] = state
        return None


def _fallbacks(stop: str) -> list[int]:
    """Return for each prefix of `stop` the length of its longest proper prefix that is also a suffix."""
    fallbacks = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = fallbacks[length - 1]
        if stop[length] == stop[index]:
            length += 1
        fallbacks[index] = length
    return fallbacks
