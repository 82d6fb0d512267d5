"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string in the text: it is `stop`, and ends before character `end`, counted from the text's start."""

    stop: str
    end: int

    @property
    def start(self) -> int:
        return self.end - len(self.stop)


class StopMatcher:
    """Finds the stop string that is complete first; of two that are complete at the same character, the longer.

    Knuth, Morris and Pratt's automaton for each string: a character costs amortised constant time for each string,
    however the text is cut, and the automaton's state is how much of the string the text now ends with.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        # Longest first, so that the first one found at a character is the longest.
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._states = [0] * len(stops)
        self._seen = 0  # characters

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return max(self._states, default=0)

    def feed(self, text: str) -> StopMatch | None:
        """The first match that `text` completes. Nothing may be fed after one."""
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
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    fallbacks = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[length] != stop[place]:
            length = fallbacks[length - 1]
        if stop[length] == stop[place]:
            length += 1
        fallbacks[place] = length
    return fallbacks
