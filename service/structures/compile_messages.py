"""Messages between a front end and its compile process: JSON lines, one for each of these classes."""

from __future__ import annotations

import msgspec


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
    """A structure to compile (`runahead.service.contract.structure.StructureSource`). depth: nesting bound of lists,
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
