"""What is wrong with a structure, and where."""

from __future__ import annotations


class StructureFault(Exception):
    """place: in the structure, as a JSON pointer for a schema (`#/properties/a`), as `line 3` of a grammar; empty for
    all of it. sentence: what is wrong there, to be put behind the place."""

    def __init__(self, place: str, sentence: str) -> None:
        super().__init__(sentence)
        self.place = place
        self.sentence = sentence
