"""Grammars in the words of Lark: what would not be enforced, or not show in a text, is refused by its line."""

from __future__ import annotations

import pytest

from runahead.service.structures.compile_messages import StructureFault
from runahead.service.structures.grammar_text import check_lark


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('start: a\na: %json {"not": {}}', "line 2", "directive"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "line 1", "directive"),
        ('start: "a"\n\nb: %regex {"substring_chars": "x"}', "line 3", "directive"),
        ("start: <|end|>", "line 1", "special token"),
        ("start: <[5,6-9]>", "line 1", "special token"),
        ("start: @other", "line 1", "another grammar"),
        ('start: a\na[max_tokens=3]: "x"', "line 2", "attribute"),
        ('start: A\n?A.2 [lazy]: "x"', "line 2", "attribute"),
        ("start: " + "(" * 65 + '"a"' + ")" * 65, "line 1", "more than 64 brackets"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_line(text: str, line: str, words: str) -> None:
    with pytest.raises(StructureFault, match=words) as refused:
        check_lark(text, 64)
    assert refused.value.location == line


@pytest.mark.parametrize(
    "text",
    [
        'start: "<|end|>" | /%json<x>@y/ | "\\"%json"  // %json <a>\n# @b\n%ignore /[ \\t]+/',
        'start: [a] b?\na: "x"\nb: A{2,3}\nA: /[a-z]/',
        "%import common.WS\nstart: WS",
    ],
)
def test_words_in_texts_expressions_and_comments_are_none_of_the_grammars(text: str) -> None:
    check_lark(text, 64)
