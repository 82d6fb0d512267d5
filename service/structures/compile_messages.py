"""What a front end and its compile process say to each other: lines of JSON, one for each of these."""

from __future__ import annotations

import msgspec


class Vocabulary(msgspec.Struct, frozen=True):
    """Said first, once. model: the path of the checkpoint. vocab_size, eos_token_ids: of the served model.

    compile_s: processor time that a structure may take. memory_mb: MiB that it may take.
    """

    model: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    compile_s: float
    memory_mb: int


class Ask(msgspec.Struct, frozen=True):
    """A structure, as `runahead.service.contract.structure.StructureSource` has it. depth: of lists, objects and
    brackets inside each other."""

    kind: str
    text: str
    depth: int


class Answer(msgspec.Struct, frozen=True):
    """grammar: what `Submit.structure` takes; empty where the structure is refused. place, sentence: what is wrong with
    it, as `StructureFault` has them. is_last: the process ends behind this answer, since it has grown."""

    grammar: str = ""
    place: str = ""
    sentence: str = ""
    is_last: bool = False
