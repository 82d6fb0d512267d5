"""What a grammar allows is what its structure says: random tokens within it, and validators that know nothing of it."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer

from runahead.runtime.checkpoint import BUNDLED_FOLDER, open_checkpoint
from runahead.runtime.grammar.matcher import load_vocabulary, new_matcher
from runahead.service.structures.grammar_text import grammar_text
from tests.schemas import SCHEMAS

EOS = 0
VOCAB = 4096
MOST = 1500  # tokens
DEPTH = 64


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(open_checkpoint(BUNDLED_FOLDER).tokenizer(), VOCAB, (EOS,))


def text_within(vocabulary: LLTokenizer, grammar: str, seed: int) -> str | None:
    """A text of tokens drawn from those that the grammar allows. None: it has not ended in time."""
    matcher, rng, ids = new_matcher(vocabulary, grammar), np.random.default_rng(seed), list[int]()
    while len(ids) < MOST:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB]
        assert not matcher.is_error(), matcher.get_error()
        token = int(rng.choice(np.flatnonzero(mask)))
        if token == EOS:
            assert matcher.is_accepting()
            return vocabulary.decode_bytes(ids).decode()
        assert matcher.consume_token(token)
        ids.append(token)
    return None


def test_there_are_two_hundred_schemas_of_many_kinds() -> None:
    assert len(SCHEMAS) == 200
    assert len({json.dumps(schema) for schema in SCHEMAS}) > 170
    for schema in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("part", range(8))
def test_every_text_within_a_schema_is_valid_by_it(vocabulary: LLTokenizer, part: int) -> None:
    ended = 0
    for place, schema in list(enumerate(SCHEMAS))[part::8]:
        grammar, _ = grammar_text("json_schema", json.dumps(schema), DEPTH)
        for seed in range(4):
            text = text_within(vocabulary, grammar, 100 * place + seed)
            if text is not None:
                ended += 1
                jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    assert ended > 90, "of 100"


@pytest.mark.parametrize(
    "expression",
    [
        r"a|b{1,3}c",
        r"(yes|no)\.",
        r"\d{3}-[A-F]{2}",
        r"[^a-z]{1,4}",
        "日本?",
        r"a/b\\",
        r"(ab){2}|",
        r"\t[\"']{1,2}",
        "(?i)maybe",
    ],
)
def test_every_text_within_an_expression_matches_it_as_a_whole(vocabulary: LLTokenizer, expression: str) -> None:
    grammar, _ = grammar_text("regex", expression, DEPTH)
    texts = [text_within(vocabulary, grammar, seed) for seed in range(20)]
    assert all(text is not None and re.fullmatch(expression, text) for text in texts)


def test_every_text_within_a_choice_is_one_of_its_texts(vocabulary: LLTokenizer) -> None:
    choices = ["yes", "yesterday", 'quo"te', "new\nline", "\x7f\x01", "back\\slash", "日本", "<|end|>", " ", "%json"]
    grammar, _ = grammar_text("choice", json.dumps(choices), DEPTH)
    texts = {text_within(vocabulary, grammar, seed) for seed in range(200)}
    assert texts == set(choices)


def test_whitespace_between_the_parts_of_a_text_is_bounded(vocabulary: LLTokenizer) -> None:
    grammar, _ = grammar_text("json_schema", '{"const": [1, 2]}', DEPTH)
    for seed in range(20):
        text = text_within(vocabulary, grammar, seed)
        assert text is not None and max(map(len, re.findall(r"\s*", text))) <= 32
    nothing, _ = grammar_text("json_schema", "true", DEPTH)
    assert new_matcher(vocabulary, nothing).validate_tokens(vocabulary.tokenize_str('{"a": [null]}')) > 0


NUMBERS = [text for k in range(-16, 17) for text in (f"{k / 4}", f"{k / 4}0", *([str(k // 4)] if k % 4 == 0 else []))]


@pytest.mark.parametrize("low", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("high", ["maximum", "exclusiveMaximum"])
def test_bounds_of_numbers_hold_wherever_they_lie_and_wherever_they_stand(
    vocabulary: LLTokenizer, low: str, high: str
) -> None:
    ends = [-3, -2.0, -1.5, -1, -0.25, 0, 0.25, 1, 1.5, 2, 2.75]
    for least, most in [(a, b) for a in ends for b in ends if a < b]:
        bounds = ({low: least}, {high: most})
        for schema in ({"type": "number", **bounds[0], **bounds[1]}, {"type": "number", "allOf": list(bounds)}):
            grammar, _ = grammar_text("json_schema", json.dumps(schema), DEPTH)
            matcher = new_matcher(vocabulary, grammar)
            validator = jsonschema.Draft202012Validator(schema)
            for text in NUMBERS:
                tokens, fresh = vocabulary.tokenize_str(text), matcher.deep_copy()
                taken = fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting()
                assert not taken or validator.is_valid(json.loads(text)), (schema, text)


# What once got through, or nearly, each with a text that must not.
NARROW: list[tuple[object, str]] = [
    ({"properties": {"a": {"type": "integer"}}}, '{"\\u0061":"x"}'),
    ({"properties": {"a": {"type": "integer"}}}, '{"b":1,"\\u0061":"x"}'),
    ({"properties": {"x/y": {"type": "integer"}}}, '{"x\\/y":"x"}'),
    ({"patternProperties": {"^b": {"type": "string"}}, "additionalProperties": {"type": "null"}}, '{"\\u0062":null}'),
    ({"type": "object", "required": ["a"], "minProperties": 2, "properties": {"a": {}}}, '{"a":1,"a":2}'),
    ({"type": "object", "minProperties": 1}, "{}"),
    ({"properties": {"ab": {"type": "string"}}, "patternProperties": {"^a": {"minLength": 2}}}, '{"ab":"x"}'),
    ({"type": "object", "patternProperties": {"^a": {}}, "maxProperties": 1}, '{"a":1,"ab":1}'),
    ({"allOf": [{"additionalProperties": False}, {"properties": {"b": {}}}]}, '{"b":1}'),
    ({"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string"}], "maximum": 3}, "6"),
    ({"$ref": "#/$defs/x", "maxLength": 1, "$defs": {"x": {"type": "string"}}}, '"ab"'),
    ({"type": "string", "pattern": "^[^a]$"}, '"\\u0061"'),
    ({"type": "string", "minLength": 1, "enum": ["", "a"]}, '""'),
    ({"prefixItems": [{"const": 1}], "minItems": 3, "items": {"const": 2}}, "[1,2]"),
    ({"type": ["integer", "string"], "enum": [1, "a", None]}, "null"),
]


@pytest.mark.parametrize(("schema", "text"), NARROW)
def test_a_text_that_is_not_valid_is_not_within_its_schema(vocabulary: LLTokenizer, schema: object, text: str) -> None:
    assert not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    matcher = new_matcher(vocabulary, grammar_text("json_schema", json.dumps(schema), DEPTH)[0])
    tokens = vocabulary.tokenize_str(text)
    assert matcher.try_consume_tokens(tokens) < len(tokens) or not matcher.is_accepting()
