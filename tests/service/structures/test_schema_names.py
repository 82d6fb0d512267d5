"""Objects whose patterns leave no name: no comma comes behind which nothing can follow."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer

from runahead.runtime.checkpoint import BUNDLED_FOLDER, open_checkpoint
from runahead.runtime.grammar.matcher import load_vocabulary, new_matcher
from runahead.service.structures.grammar_text import grammar_text
from runahead.service.structures.schema_check import enforced

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ONE = {"type": "object", "properties": {"a": DIGIT}, "required": ["a"], "additionalProperties": False}
SCHEMAS: list[dict[str, Any]] = [
    {**ONE, "patternProperties": {"^a$": {"type": "integer"}}},
    {**ONE, "patternProperties": {"^(?:a|b)$": {"maximum": 5}}},
    {**ONE, "patternProperties": {"^[ab]$": DIGIT, "^[c-e]$": False}},
    {**ONE, "patternProperties": {"^a$": {"type": "integer"}}, "maxProperties": 1},
    {"required": ["a"], "patternProperties": {"^a$": DIGIT}, "additionalProperties": False, "type": "object"},
    {"allOf": [ONE, {"patternProperties": {"^a$": {"minimum": 3}}, "additionalProperties": False}]},
    {"type": "object", "patternProperties": {"^": False}},
    {"type": "object", "patternProperties": {"^x": DIGIT, "^y$": DIGIT}, "additionalProperties": False},
]


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(open_checkpoint(BUNDLED_FOLDER).tokenizer(), 4096, (0,))


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_no_text_within_an_object_comes_to_a_place_that_nothing_follows(
    vocabulary: LLTokenizer, schema: dict[str, Any]
) -> None:
    grammar, _ = grammar_text("json_schema", json.dumps(schema), 64)
    ended = 0
    for seed in range(12):
        matcher, drawn, ids = new_matcher(vocabulary, grammar), np.random.default_rng(seed), list[int]()
        while len(ids) < 300:
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            assert not matcher.is_error(), (vocabulary.decode_bytes(ids), matcher.get_error())
            ids.append(int(drawn.choice(np.flatnonzero(mask))))
            assert matcher.consume_token(ids[-1])
            if ids[-1] == 0:
                ended += 1
                value = json.loads(vocabulary.decode_bytes(ids[:-1]))
                jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
                break
    assert ended


def test_patterns_of_few_names_are_properties_and_others_stay() -> None:
    clean = enforced({"properties": {"a": {"maximum": 3}}, "patternProperties": {"^[ab]$": DIGIT, "^a": {}, "a$": {}}})
    properties = {"a": {"allOf": [{"maximum": 3}, DIGIT]}, "b": DIGIT}
    assert clean == {"properties": properties, "patternProperties": {"^a": {}, "a$": {}}}
    many: dict[str, Any] = {"patternProperties": {"^[a-z]{2}$": {}, "^x*$": {}, "^(": {}}}
    assert enforced(many) == many


def test_names_that_are_counted_stay_a_pattern_unless_they_are_declared() -> None:
    """The library counts those of a pattern, and those of properties only where all are required."""
    counted = {"patternProperties": {"^[ab]$": {}}, "maxProperties": 1}
    assert enforced(counted) == counted
