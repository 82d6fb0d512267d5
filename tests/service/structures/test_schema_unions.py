"""Unions of schemas: which branches exclude each other, and keywords of OpenAPI beside them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer

from runahead.runtime.checkpoint import BUNDLED_FOLDER, open_checkpoint
from runahead.runtime.grammar.matcher import load_vocabulary, new_matcher
from runahead.service.structures.compile_messages import StructureFault
from runahead.service.structures.grammar_text import grammar_text
from runahead.service.structures.schema_check import enforced

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"const": 9}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
PETS = {"$defs": {"cat": CAT, "dog": DOG}, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}

EXCLUSIVE: list[dict[str, Any]] = [
    {"oneOf": [{"type": "string"}, {"type": ["integer", "null"]}]},
    {"oneOf": [{"const": 1}, {"const": 2}, {"type": "string"}]},
    {"oneOf": [{"enum": [1, "a"]}, {"enum": [True, "b", 1.5]}]},
    {"oneOf": [CAT, DOG]},
    PETS,
    {"oneOf": [{"type": "integer"}, {"anyOf": [{"type": "null"}, {"const": 1.5}]}]},
    {"oneOf": [{"allOf": [{"type": "object"}, CAT]}, DOG]},
    {"oneOf": [False, {"type": "boolean"}]},
]
OVERLAPPING: list[dict[str, Any]] = [
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    {"oneOf": [{}, {"type": "null"}]},
    {"oneOf": [{"const": 1}, {"const": 1.0}]},
    {"oneOf": [{"minLength": 2}, {"maxLength": 1}]},
    {"oneOf": [CAT, {**DOG, "required": []}, {"type": "object"}]},
    {"oneOf": [{"properties": {"kind": {"const": 1}}}, {"properties": {"kind": {"const": 2}}}]},
    {"$defs": {"a": {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"},
    {"oneOf": [{"$ref": "#/$defs/none"}, {"type": "null"}]},
    {"oneOf": [{"type": "integer", "nullable": True}, {"type": "string", "nullable": True}]},
    {"oneOf": [{"const": 1, "nullable": True}, {"type": "null"}]},
    {"oneOf": [{"$ref": "#/$defs/a", "nullable": True}, {"type": "null"}], "$defs": {"a": {"type": "string"}}},
]


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(open_checkpoint(BUNDLED_FOLDER).tokenizer(), 4096, (0,))


def texts_within(vocabulary: LLTokenizer, schema: Any, seeds: int = 8) -> list[str]:
    """Texts that have ended within some tokens drawn under the masks of the schema's grammar."""
    grammar, _ = grammar_text("json_schema", json.dumps(schema), 64)
    texts = list[str]()
    for seed in range(seeds):
        matcher, drawn, ids = new_matcher(vocabulary, grammar), np.random.default_rng(seed), list[int]()
        while len(ids) < 400:
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            ids.append(int(drawn.choice(np.flatnonzero(mask))))
            if ids[-1] == 0:
                texts.append(vocabulary.decode_bytes(ids[:-1]).decode())
                break
            assert matcher.consume_token(ids[-1])
    return texts


@pytest.mark.parametrize("schema", EXCLUSIVE, ids=json.dumps)
def test_branches_of_one_of_that_exclude_each_other_are_enforced(vocabulary: LLTokenizer, schema: Any) -> None:
    texts = texts_within(vocabulary, schema)
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize("schema", OVERLAPPING, ids=json.dumps)
def test_branches_of_one_of_that_may_overlap_are_refused_with_advice_that_a_caller_can_follow(schema: Any) -> None:
    with pytest.raises(StructureFault, match="exclude each other; anyOf is always enforced") as fault:
        enforced(schema)
    assert fault.value.location.endswith("/oneOf")


@pytest.mark.parametrize("union", ["oneOf", "anyOf"])
def test_a_discriminator_is_passed_over_beside_branches_with_its_constants(vocabulary: LLTokenizer, union: str) -> None:
    mapped = {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat"}}
    schema = {"$defs": PETS["$defs"], union: PETS["oneOf"], "discriminator": mapped}
    assert all(json.loads(text)["kind"] in ("cat", "dog", "wolf") for text in texts_within(vocabulary, schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [CAT, DOG], "discriminator": {"propertyName": "lives"}},
        {"oneOf": [CAT, DOG], "discriminator": "kind"},
        {"anyOf": [CAT, {**DOG, "required": []}], "discriminator": {"propertyName": "kind"}},
        {"discriminator": {"propertyName": "kind"}},
    ],
)
def test_a_discriminator_that_says_more_than_the_branches_is_refused(schema: Any) -> None:
    with pytest.raises(StructureFault, match="each require its property and have a constant for it") as fault:
        enforced({"items": schema})
    assert fault.value.location == "#/items/discriminator"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "maximum": 1, "minimum": 0},
        {"type": ["integer", "boolean"], "enum": [1, True]},
        {"const": "a"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}},
        {"oneOf": [{"const": 1}, {"const": 2}]},
        {"oneOf": [{"type": "integer", "maximum": 3, "minimum": 1}, {"type": "boolean"}]},
        {"type": "string", "format": "ipv4"},
    ],
    ids=json.dumps,
)
def test_nullable_adds_null_and_nothing_else(vocabulary: LLTokenizer, schema: dict[str, Any]) -> None:
    values = [json.loads(text) for text in texts_within(vocabulary, {**schema, "nullable": True}, seeds=30)]
    assert None in values
    validator = jsonschema.Draft202012Validator(schema)
    assert all(value is None or validator.is_valid(value) for value in values)
    assert enforced({**schema, "nullable": False}) == enforced(schema)


def test_keywords_that_are_turned_off_are_passed_over() -> None:
    assert enforced({"type": "array", "uniqueItems": False, "nullable": False}) == {"type": "array"}


def test_multiples_that_are_combined_stay_within_what_the_library_can_hold(vocabulary: LLTokenizer) -> None:
    part = {"$defs": {"a": {"multipleOf": 65537}}}
    for beside in ({"allOf": [{"multipleOf": 65537}]}, {"anyOf": [{"multipleOf": 65537}]}, {"$ref": "#/$defs/a"}):
        with pytest.raises(StructureFault, match="whose product is too large"):
            enforced({**part, "type": "integer", "multipleOf": 65536, **beside})
    enforced({"multipleOf": 65536, "properties": {"a": {"multipleOf": 65537}}})
    schema = {"type": "number", "multipleOf": 0.25, "allOf": [{"multipleOf": 1.5}], "minimum": 1, "maximum": 4}
    assert {float(text) for text in texts_within(vocabulary, schema)} == {1.5, 3.0}
