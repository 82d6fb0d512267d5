"""A structure's fault and its location."""

from __future__ import annotations


class StructureFault(Exception):
    """An invalid structure. place: a JSON pointer in a schema (`#/properties/a`), `line 3` of a grammar, or empty for
    all of it. sentence: the fault, appended to the place.
    """

    def __init__(self, place: str, sentence: str) -> None:
        super().__init__(sentence)
        self.place = place
        self.sentence = sentence
