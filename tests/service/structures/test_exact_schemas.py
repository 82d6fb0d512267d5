"""Schemas whose numbers are long and whose formats have rules: nothing that is not valid is let through."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from runahead.runtime.checkpoint import BUNDLED_FOLDER, open_checkpoint
from runahead.runtime.grammar.matcher import GrammarError, load_vocabulary, new_matcher
from runahead.service.structures.compile_messages import StructureFault
from runahead.service.structures.grammar_text import grammar_text

BORDERS = [base + more for base in (2**53, 2**62, 10**18, 2**63, 2**64, 10**30) for more in (-1, 0, 1)]
LONG = [sign * border for border in BORDERS for sign in (1, -1)]
NEAR = sorted({value + more for value in LONG for more in (-1025, -1024, -96, -1, 0, 1, 96, 1024)} | {0})
KEYWORDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const"]


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(open_checkpoint(BUNDLED_FOLDER).tokenizer(), 4096, (0,))


def matcher_of(vocabulary: LLTokenizer, schema: Any) -> LLMatcher:
    return new_matcher(vocabulary, grammar_text("json_schema", json.dumps(schema), 64)[0])


def takes(matcher: LLMatcher, vocabulary: LLTokenizer, text: str) -> bool:
    tokens, fresh = vocabulary.tokenize_str(text), matcher.deep_copy()
    return bool(fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting())


@pytest.mark.parametrize("kind", ["integer", "number", None])
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_long_numbers_are_refused_by_their_place_or_enforced_and_never_wider(
    vocabulary: LLTokenizer, keyword: str, kind: str | None
) -> None:
    taken = refused = 0
    for value in LONG:
        schema = {keyword: value} if kind is None else {"type": kind, keyword: value}
        try:
            matcher = matcher_of(vocabulary, schema)
        except StructureFault as fault:
            assert fault.location == f"#/{keyword}"
            refused += 1
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for text in map(str, NEAR):
            if takes(matcher, vocabulary, text):
                assert validator.is_valid(json.loads(text)), (schema, text)
                taken += 1
    assert taken and refused


def test_integers_of_64_bits_can_be_asked_for_in_several_ways(vocabulary: LLTokenizer) -> None:
    bounds = {"minimum": -(2**63), "maximum": 2**63 - 1}
    for schema in ({"type": "integer", **bounds}, {"type": "integer", "format": "int64"}):
        matcher = matcher_of(vocabulary, schema)
        for value, is_taken in ((2**63 - 1, True), (2**63, False), (-(2**63) + 1024, True), (-(2**63) - 1, False)):
            assert takes(matcher, vocabulary, str(value)) is is_taken
    short = matcher_of(vocabulary, {"type": "integer", "format": "int32", "minimum": 0})
    assert [takes(short, vocabulary, str(value)) for value in (-1, 0, 2**31 - 1, 2**31)] == [False, True, True, False]


def test_bounds_between_which_nothing_is_exact_are_refused_by_their_place(vocabulary: LLTokenizer) -> None:
    with pytest.raises(StructureFault, match="leave no number which is enforced exactly") as fault:
        matcher_of(vocabulary, {"items": {"type": "integer", "minimum": 10**18 + 1, "maximum": 10**18 + 3}})
    assert fault.value.location == "#/items"


@pytest.mark.parametrize(
    "value", [2**53 + 1, 2**64 + 1, 10**30 + 1, 1e300, [1, {"a": 2**64}], 0.10538766593973947, 2e-30]
)
def test_a_constant_that_would_change_is_refused(vocabulary: LLTokenizer, value: Any) -> None:
    for keyword, of in (("const", value), ("enum", ["a", value])):
        with pytest.raises(StructureFault, match="too long to be enforced") as fault:
            matcher_of(vocabulary, {"properties": {"a": {keyword: of}}})
        assert fault.value.location == f"#/properties/a/{keyword}"


@pytest.mark.parametrize(
    "value", [2**62, float(2**62), 10**18, -(2**53), 1.0, 0.1, 1e-7, 0.123456789012345, True, None]
)
def test_a_constant_is_written_as_a_number_equal_to_it(vocabulary: LLTokenizer, value: Any) -> None:
    matcher = matcher_of(vocabulary, {"const": value})
    ids = matcher.compute_ff_tokens()
    assert json.loads(vocabulary.decode_bytes(ids)) == value


@pytest.mark.parametrize("bound", [0.10538766593973947, -129241.96732385957, 2.0118912501927044e-13, 3e-30, -1e-300])
def test_fractions_of_many_digits_bound_from_the_inside(vocabulary: LLTokenizer, bound: float) -> None:
    for keyword, outwards in (("minimum", -math.inf), ("maximum", math.inf)):
        beyond = np.format_float_positional(math.nextafter(bound, outwards))
        schema = {"type": "number", keyword: bound}
        matcher = matcher_of(vocabulary, schema)
        assert float(beyond) != bound and not takes(matcher, vocabulary, beyond)
        assert takes(matcher, vocabulary, str(int(bound - math.copysign(2, outwards))))


FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "2025-02-28", "1963-06-19", "2020-12-31", "9999-12-31"],
        ["2025-02-29", "1900-02-29", "2100-02-29", "2020-02-30", "2020-04-31", "2020-13-01", "0000-01-01", "98-01-01"],
    ),
    "time": (
        ["08:30:06Z", "08:30:06.283185Z", "08:30:06+00:20", "23:59:60Z", "23:59:60.5+00:00", "08:30:06z"],
        ["12:00:60Z", "22:59:60Z", "23:58:60Z", "23:59:60+01:00", "24:00:00Z", "08:30:06", "08:30:06-24:00", "8:3:6Z"],
    ),
    "date-time": (
        ["1963-06-19T08:30:06.28Z", "1985-04-12T23:20:50.52Z", "1990-12-31T23:59:60Z", "1998-12-31T23:59:60.123Z",
         "1937-01-01T12:00:27.87+00:20", "2024-02-29t00:00:00z"],
        ["1998-12-31T23:58:60Z", "1998-12-31T22:59:60Z", "1998-11-30T23:59:60Z", "1990-02-31T15:59:59.123-08:00",
         "2025-02-29T00:00:00Z", "1990-12-31T15:59:59-24:00", "06/19/1963 08:30:06 PST", "2013-350T01:01:01"],
    ),
    "hostname": (
        ["www.example.com", "localhost", "a-b", "1", "h0s-t.x", "a" * 63, ".".join(["a" * 63] * 3 + ["b" * 61]),
         "x" * 62, "ab-c" + "d" * 59],
        ["a" * 64, ".".join(["a" * 63] * 3 + ["b" * 62]), "-a", "a-", "a_b", "a..b", ".a", "a.", "", "xn--X", "ab--cd"],
    ),
    "email": (
        ["joe.bloggs@example.com", "te~st@example.com", "a" * 64 + "@x"],
        ["2962", ".test@example.com", "te..st@x", "test.@x", "a@-b", "a@b..c"],
    ),
    "ipv4": (["192.168.0.1", "0.0.0.0"], ["127.0.0.0.1", "256.1.1.1", "087.10.0.1", "127.0", "1.2.3"]),
    "ipv6": (
        ["::1", "::", "1::", "1:2:3:4:5:6:7::", "ab::8"],
        ["12345::", "1::2::3", ":2:3:4:5:6:7:8", "1:2:3:4:5:6:7", ":"],
    ),
    "uuid": (
        ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
        ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638"],
    ),
    "duration": (["P4DT12H30M5S", "P1Y", "PT36H", "P2W"], ["PT1D", "P", "P1YT", "PT", "P2D1Y", "P1D2H", "P1Y2W", "1D"]),
    "uri": (
        ["http://foo.bar/?baz=qux#quux", "urn:oasis:names", "ftp://[2001:db8::7]/c"],
        ["//foo/bar", "abc", "http:// x", ":// x"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("beside", [{}, {"pattern": ""}, {"allOf": [{"minLength": 0}]}, {"maxLength": 300}], ids=str)
def test_formats_take_their_standards_texts_and_no_others(
    vocabulary: LLTokenizer, name: str, beside: dict[str, Any]
) -> None:
    matcher = matcher_of(vocabulary, {"type": "string", "format": name, **beside})
    valid, invalid = FORMATS[name]
    assert [text for text in valid if not takes(matcher, vocabulary, json.dumps(text))] == []
    assert [text for text in invalid if takes(matcher, vocabulary, json.dumps(text))] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "date", "pattern": "^2025-02-29$"},
        {"type": "string", "format": "date-time", "pattern": "12:00:60Z$"},
        {"type": "string", "format": "hostname", "minLength": 254, "maxLength": 260},
    ],
)
def test_a_format_beside_a_text_that_it_forbids_is_refused(vocabulary: LLTokenizer, schema: Any) -> None:
    with pytest.raises(GrammarError):
        matcher_of(vocabulary, schema)
