"""Messages between a front end and its compile process, JSON lines, one for each of these classes; and a structure's
fault.
"""

from __future__ import annotations

import msgspec


class StructureFault(Exception):
    """An invalid structure.

    location: a JSON pointer in a schema (`#/properties/a`), `line 3` of a grammar, or empty for all of it.
    sentence: the fault, appended to the location.
    """

    def __init__(self, location: str, sentence: str) -> None:
        super().__init__(sentence)
        self.location = location
        self.sentence = sentence


class Vocabulary(msgspec.Struct, frozen=True):
    """The first message. model: path of the checkpoint. vocab_size, eos_token_ids: the model's.

    compile_s: processor time for a structure. memory_mb: MiB for it.
    """

    model: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    compile_s: float
    memory_mb: int


class Ask(msgspec.Struct, frozen=True):
    """A structure to compile (`runahead.service.contract.inputs.StructureSource`). depth: nesting bound of lists,
    objects and brackets.
    """

    kind: str
    text: str
    depth: int


class Answer(msgspec.Struct, frozen=True):
    """The result. grammar: for `Submit.structure`; empty if the structure is refused. location, sentence: the fault
    (`StructureFault`). is_last: the process ends after this answer because it has grown.
    """

    grammar: str = ""
    location: str = ""
    sentence: str = ""
    is_last: bool = False
