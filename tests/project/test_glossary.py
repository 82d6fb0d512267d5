"""The glossary: each of its words is used, has one meaning, and is found by who begins to read."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Final

import pytest

from tests.project.repository import PACKAGES, ROOT, TESTS, documents, sources

GLOSSARY: Final = ROOT / "docs" / "glossary.md"
ENTRIES: Final = re.findall(r"^\*\*(.+?)\.\*\*", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
TERMS: Final = [term.strip() for entry in ENTRIES for term in entry.split(",")]


@cache
def everything_else() -> str:
    """Sources and documents without the glossary and this file, names split into words, in small letters."""
    from_elsewhere = [path for path in documents() if path != GLOSSARY]
    from_elsewhere += [path for path in sources(*PACKAGES, *TESTS) if path.name != "test_glossary.py"]
    text = " ".join(path.read_text(encoding="utf-8") for path in from_elsewhere)
    return re.sub(r"[\s_]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)).lower()


def is_used(term: str) -> bool:
    """In any form: of a verb or a noun its endings too."""
    stem = re.escape(term.lower().removesuffix("e") if len(term) > 1 else term.lower())
    return bool(re.search(rf"\b{stem}(e|ed|es|s|ing|ned|ted)?\b", everything_else()))


@pytest.mark.parametrize("term", TERMS)
def test_a_word_of_the_glossary_is_used(term: str) -> None:
    assert is_used(term)


def test_a_word_that_nobody_uses_is_seen() -> None:
    assert not is_used("Quiddi" + "ties")


def test_a_word_has_one_entry() -> None:
    assert len(TERMS) >= 30
    assert [term for term, times in Counter(term.lower() for term in TERMS).items() if times > 1] == []


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_who_begins_to_read_is_led_to_the_glossary(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    assert GLOSSARY in {((ROOT / page).parent / link).resolve() for link in links}
