"""Schemas: each keyword is enforced, says nothing about what is valid, or is refused by its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runahead.service.structures.compile_messages import StructureFault
from runahead.service.structures.schema_check import enforced, parts, pointer, read_schema

REFUSED: dict[str, tuple[Any, str, str]] = {
    "not": ({"not": {}}, "#/not", "not enforced"),
    "inside": ({"properties": {"a/b~": {"if": {}}}}, "#/properties/a~1b~0/if", "not enforced"),
    "in a list": ({"anyOf": [{}, {"uniqueItems": True}]}, "#/anyOf/1/uniqueItems", "not enforced"),
    "in a definition": ({"$defs": {"x": {"contains": {}}}}, "#/$defs/x/contains", "not enforced"),
    "a misspelt one": ({"requird": []}, "#/requird", "not enforced"),
    "a word for a boolean": ({"type": "string", "nullable": "yes"}, "#/nullable", "not enforced"),
    "a bound that is a text": ({"maximum": "1"}, "#/maximum", "must be a number"),
    "a format of other integers": ({"type": "integer", "format": "int16"}, "#/format", "int32, int64"),
    "an integer's format of any number": (
        {"type": "number", "format": "int64"},
        "#/format",
        "beside the type integer alone",
    ),
    "what the library would be told": ({"x-guidance": {"lenient": True}}, "#/x-guidance", "not enforced"),
    "an inner $id": ({"items": {"$id": "x"}}, "#/items/$id", "not enforced"),
    "items as a list": ({"items": [{}]}, "#/items", "must be a schema"),
    "no schema": ({"properties": {"a": 5}}, "#/properties/a", "must be a schema"),
    "no schemas": ({"properties": []}, "#/properties", "must be an object of schemas"),
    "no list": ({"anyOf": {}}, "#/anyOf", "must be a list of schemas"),
    "another file": ({"$ref": "other.json#/a"}, "#/$ref", "must lead to a place in this schema"),
    "an anchor": ({"$ref": "#name"}, "#/$ref", "must lead to a place in this schema"),
    "a bound of draft 4": ({"minimum": 1, "exclusiveMinimum": True}, "#/exclusiveMinimum", "must be a number"),
    "names that may stand twice": ({"minProperties": 2}, "#/minProperties", "one more than are in required"),
    "names that may, beside one": ({"required": ["a", "a"], "minProperties": 3}, "#/minProperties", "one more than"),
    "an unknown format": ({"type": "string", "format": "regex"}, "#/format", "formats are date-time"),
    "a format of no string": ({"type": "integer", "format": "date"}, "#/format", "beside the type string alone"),
}


@pytest.mark.parametrize(("schema", "place", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_enforced_is_refused_by_its_place(schema: Any, place: str, words: str) -> None:
    with pytest.raises(StructureFault, match=words) as refused:
        enforced(schema)
    assert refused.value.location == place


def test_names_of_properties_and_values_are_no_keywords() -> None:
    schema = {"properties": {"not": {"const": {"if": 1}}, "title": {"enum": [{"not": {}}]}}, "default": {"not": 1}}
    assert enforced(schema) == {"properties": schema["properties"]}


def test_what_is_about_people_is_left_out_and_the_order_of_the_rest_stays() -> None:
    text = '{"title": "T", "properties": {"b": {"description": "B"}, "a": true}, "x-n": 1, "$id": "", "type": "object"}'
    clean = enforced(read_schema(text, 64))
    assert json.dumps(clean) == '{"properties": {"b": {}, "a": true}, "type": "object"}'


def test_parts_come_from_the_inside_out_each_with_its_place() -> None:
    schema = {"anyOf": [{"items": True}], "properties": {"a": {"type": "null"}}}
    assert [place for place, _ in parts(schema)] == ["#/anyOf/0/items", "#/anyOf/0", "#/properties/a", "#"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("", "is no JSON"),
        ("NaN", "is not a finite number"),
        ('{"minimum": 1e400}', "is not a finite number"),
        ('{"a": 1, "b": 2, "a": 3}', "the key a stands twice"),
        ('{"const": "\\ud800"}', "no text may hold"),
        ('{"minimum": ' + "9" * 10_000 + "}", "is not a finite number"),
        ('{"minimum": -' + "9" * 400 + "}", "is not a finite number"),
        ("[1]", "must be an object"),
        ("[" * 65 + "]" * 65, "65 lists and objects inside each other, and may have 64"),
        ("[" * 100_000, "100000 lists"),
        ('{"a":' * 100_000, "100000 lists"),
    ],
)
def test_a_text_that_holds_no_schema_is_refused(text: str, words: str) -> None:
    with pytest.raises(StructureFault, match=words):
        read_schema(text, 64)


def test_brackets_in_texts_are_no_depth() -> None:
    assert read_schema(json.dumps({"const": '[[[["\\"[[[' * 50}), 64)
    assert pointer("n" * 100) == "n" * 60 + "…"
