"""A structure's fault and its location."""

from __future__ import annotations


class StructureFault(Exception):
    """An invalid structure.

    location: a JSON pointer in a schema (`#/properties/a`), `line 3` of a grammar, or empty for all of it.
    sentence: the fault, appended to the location.
    """

    def __init__(self, location: str, sentence: str) -> None:
        super().__init__(sentence)
        self.location = location
        self.sentence = sentence
