"""Grammars in EBNF: they allow what they mean to llama.cpp, and what is wrong is named by its line."""

from __future__ import annotations

import pytest
from llguidance import LLTokenizer

from runahead.runtime.checkpoint import BUNDLED_FOLDER, open_checkpoint
from runahead.runtime.grammar.matcher import load_vocabulary, new_matcher
from runahead.service.structures.compile_messages import StructureFault
from runahead.service.structures.grammar_text import grammar_text, lark_of


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(open_checkpoint(BUNDLED_FOLDER).tokenizer(), 4096, (0,))


def allows(vocabulary: LLTokenizer, ebnf: str, text: str) -> bool:
    matcher = new_matcher(vocabulary, grammar_text("ebnf", ebnf, 64)[0])
    ids = vocabulary.tokenize_bytes(text.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("ebnf", "allowed", "not_allowed"),
    [
        ('root ::= "a" | "b" root', ["a", "bba"], ["", "b", "ab"]),
        ('root ::= "yes"\n  | "no"\n', ["yes", "no"], ["yesno"]),
        ('root ::= item ("," item)*\nitem ::= [0-9]+ | "x"{2,3}', ["1", "12,xx", "xxx"], ["x", "1,", "1,,2"]),
        ('root ::= "a" ws "b"\nws ::= [ \\t]*', ["ab", "a \tb"], ["a\nb"]),
        ('# a comment with "quotes" and [\nroot ::= "#" # more\n', ["#"], [""]),
        ('root ::= ("a" | ) "b"', ["ab", "b"], ["a"]),
        # What Lark or Rust's expressions read in another way than EBNF.
        ('root ::= "\\u0041BC"', ["ABC"], ["\u41bc"]),
        ('root ::= "\\x41\\U0001F600\\"\\\\\\n\\[\\]"', ['A\U0001f600"\\\n[]'], []),
        ("root ::= [a&&b~~]+", ["a&b~"], ["c"]),
        ("root ::= [a\\-z]", ["a", "-", "z"], ["b"]),
        ("root ::= [-a-c]", ["-", "b"], ["d"]),
        ("root ::= [^\\]^[/]", ["a", "\n"], ["]", "^", "[", "/"]),
        ("root ::= [\\u00e0-\\u00ff]", ["é"], ["e"]),
        ("root ::= . .", ["\na", "é\U0001f600"], ["a"]),
        ('root ::= "\x7f\\x01<|end|>%json@a"', ["\x7f\x01<|end|>%json@a"], []),
    ],
    ids=[
        "alternatives",
        "a-line-that-begins-with-one",
        "repetition",
        "a-rule-of-one-class",
        "comments",
        "an-empty-alternative",
        "an-escape-before-letters",
        "escapes",
        "signs-of-set-operations",
        "an-escaped-dash",
        "a-dash-at-the-start",
        "a-negated-class",
        "a-range-of-escapes",
        "dots",
        "signs-of-lark",
    ],
)
def test_a_grammar_allows_what_it_means(
    vocabulary: LLTokenizer, ebnf: str, allowed: list[str], not_allowed: list[str]
) -> None:
    for text in allowed:
        assert allows(vocabulary, ebnf, text), text
    for text in not_allowed:
        assert not allows(vocabulary, ebnf, text), text


@pytest.mark.parametrize(
    ("ebnf", "line", "words"),
    [
        ('root ::= "a"\nb = "c"', "line 2", "Expected ::="),
        ('root ::= "a', "line 1", "Unexpected end"),
        ('root ::= "a"\n\nb ::= []', "line 3", "a class without a character"),
        ("root ::= [\\ud800]", "line 1", "the escape \\ud800"),
        ('root ::= a\na ::= "\\d"', "line 2", "the escape \\d"),
        ('root ::= "a"\nroot ::= "b"', "line 2", "a second rule root"),
        ("root ::= " + "(" * 65 + '"a"' + ")" * 65, "line 1", "more than 64 brackets"),
        ("root ::= nowhere", "", "Rule 'nowhere' not found"),
        ('start: "a"', "line 1", "Expected ::="),
        ('a ::= "a"', "", "No 'root' rule"),
        ('root ::= aB a_b\naB ::= "a"\na_b ::= "b"', "", "already exists"),
    ],
)
def test_what_is_wrong_is_refused_by_its_line(ebnf: str, line: str, words: str) -> None:
    with pytest.raises(StructureFault) as refused:
        lark_of(ebnf, 64)
    assert refused.value.location == line and words in refused.value.sentence, refused.value.sentence
