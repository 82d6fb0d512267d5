"""Validates a request's structure as far as that takes no time.

A separate process compiles it: see `runahead.service.structures`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, Literal

from runahead.service.contract.limits import LIMITS
from runahead.service.contract.violations import Violations
from runahead.v1 import GenerateOnceRequest, GenerateRequest

Kind = Literal["json_schema", "regex", "choice", "grammar", "ebnf"]

_ANY_OBJECT: Final = '{"type":"object"}'
_BESIDE: Final = "must not be set beside structure, whose end is an end-of-sequence token"
_MISSING: Final = "is empty: set json_schema, json_object, regex, choice, grammar or ebnf"


@dataclass(frozen=True, slots=True)
class StructureSource:
    """A request's structure as text.

    text: the schema, expression or grammar, or a choice's texts as a JSON list. field: its path.
    """

    kind: Kind
    text: str
    field: str


def check_structure(request: GenerateRequest | GenerateOnceRequest, found: Violations) -> StructureSource | None:
    """Validate a structure and record its violations. Returns None without a valid one."""
    if not request.HasField("structure"):
        return None
    found.require(not request.stopping.ignore_eos, "stopping.ignore_eos", _BESIDE)
    structure = request.structure
    kind = structure.WhichOneof("kind")
    if kind is None:
        found.require(False, "structure", _MISSING)
        return None
    field = f"structure.{kind}"
    if kind == "json_object":
        found.require(structure.json_object, field, "must be true, or unset")
        return StructureSource("json_schema", _ANY_OBJECT, field)
    if kind == "choice":
        texts = list(structure.choice.texts)
        _check_choice(texts, found)
        return StructureSource(kind, json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False), field)
    text: str = getattr(structure, kind)
    found.require(bool(text), field, "must not be empty")
    _check_bytes(len(text.encode()), field, found)
    return StructureSource(kind, text, field)


def _check_choice(texts: list[str], found: Violations) -> None:
    field = "structure.choice.texts"
    if not found.require(bool(texts), field, "must have at least one entry"):
        return
    if not found.require_at_most(LIMITS.choices, len(texts), field):
        return
    sizes = [len(text.encode()) for text in texts]
    found.require_sizes(sizes, LIMITS.choice_bytes, field)
    _check_bytes(sum(sizes), field, found)


def _check_bytes(size: int, field: str, found: Violations) -> None:
    most = LIMITS.structure_bytes
    found.require(size <= most, field, f"must be at most {most} bytes of UTF-8, and has {size}")
