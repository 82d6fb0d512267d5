"""Structures for requests of workloads, and whether a completion that has ended by itself is what was asked for."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any, Final

import jsonschema

from runahead.v1 import GenerateRequest
from tests.parity.workload import Asked, workload
from tests.schemas import SCHEMAS

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name_of_the_function": {"enum": ["read_lines", "write_lines", "count_lines"]},
        "is_deprecated": {"type": "boolean"},
        "number_of_lines": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name_of_the_function", "is_deprecated", "number_of_lines"],
    "additionalProperties": False,
}
NAME: Final = r"[a-z]{3}_[a-z]{2}"
# Nothing of these ends before it is long.
ENDLESS_SCHEMA: Final[dict[str, Any]] = {"type": "array", "items": SCHEMA, "minItems": 40}
ENDLESS: Final = r"([a-z_]+ = [a-z_]+\([0-9]*\)\n){40,}"
_CHOICES: Final = ("the first of them", "the second of them", "another")
_SHARE: Final = 0.35  # of a mixed workload's requests that have a structure
_LEFT: Final = "status FAILED_PRECONDITION: no token is left at this position"


def structured(asked: list[Asked], *, ends: bool) -> Counter[str]:
    """Gives two of three requests of a cell a structure: one that ends soon, or where the event needs them to go on one
    that does not. Which one follows from the prompt. Returns how many there are of each kind."""
    prompts: dict[str, int] = {}
    kinds: Counter[str] = Counter()
    for item in asked:
        request = item.request
        said = request.text or " ".join(map(str, request.token_ids.ids))
        kind = ("json_schema", "plain", "regex")[prompts.setdefault(said, len(prompts)) % 3]
        if kind != "plain":
            request.stopping.ignore_eos = False
        if kind == "json_schema":
            request.structure.json_schema = json.dumps(SCHEMA if ends else ENDLESS_SCHEMA)
        elif kind == "regex":
            request.structure.regex = NAME if ends else ENDLESS
        kinds[kind] += 1
    return kinds


def mixed_workload(seed: int) -> list[Asked]:
    """The requests of `workload`, a third of which have a structure of any kind. Some of these allow tokens of which it
    takes none."""
    dice = random.Random(f"structures of {seed}")
    asked = workload(seed)
    for item in asked:
        if dice.random() < _SHARE:
            item.request.stopping.ignore_eos = False
            _structure(dice, item.request)
    return asked


def _structure(dice: random.Random, request: GenerateRequest) -> None:
    structure = request.structure
    match dice.choice(("json_schema", "json_schema", "json_object", "regex", "choice", "grammar")):
        case "json_schema":
            structure.json_schema = json.dumps(dice.choice((SCHEMA, dice.choice(SCHEMAS))))
        case "json_object":
            structure.json_object = True
        case "regex":
            structure.regex = dice.choice((NAME, r"[0-9]{1,3}(\.[0-9]{2})?", ENDLESS))
        case "choice":
            structure.choice.texts.extend(_CHOICES)
        case "grammar":
            structure.grammar = 'start: "[" NUMBER ("," NUMBER)* "]"\nNUMBER: /[0-9]{1,2}/\n'


def is_structured(request: GenerateRequest) -> bool:
    return request.HasField("structure")


def nothing_was_left(request: GenerateRequest, reason: str) -> bool:
    """It has ended since what it allows beside its structure, and what that takes, have no token in common."""
    forbids = bool(request.sampling.allowed_token_ids or request.stopping.min_tokens)
    return is_structured(request) and forbids and reason.startswith(_LEFT)


def fits(request: GenerateRequest, text: str) -> bool:
    """Is the completion, which has ended by itself, what was asked for? Raises ValueError where it should be JSON and
    is not, jsonschema.ValidationError where it is not valid by its schema."""
    structure = request.structure
    match structure.WhichOneof("kind"):
        case "json_schema":
            jsonschema.Draft202012Validator(json.loads(structure.json_schema)).validate(json.loads(text))
            return True
        case "json_object":
            return isinstance(json.loads(text), dict)
        case "regex":
            return re.fullmatch(structure.regex, text) is not None
        case "choice":
            return text in structure.choice.texts
        case _:
            return re.fullmatch(r"\[[0-9]{1,2}(,[0-9]{1,2})*\]", text) is not None
