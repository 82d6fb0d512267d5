"""The glossary: each of its words is used, has one meaning, and is found by who begins to read."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

import pytest

from tests.project.repository import PACKAGES, ROOT, TESTS, documents, sources

GLOSSARY: Final = ROOT / "docs" / "glossary.md"
ENTRIES: Final = re.findall(r"^\*\*(.+?)\.\*\*", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
TERMS: Final = [term.strip() for entry in ENTRIES for term in entry.split(",")]


def definitions(page: str) -> dict[str, set[str]]:
    """The entries, by their bold words, that define each term: in bold, or in italics within the entry."""
    found: dict[str, set[str]] = {}
    for entry, body in re.findall(r"^\*\*(.+?)\.\*\*(.*?)(?=^\*\*|^## |\Z)", page, re.MULTILINE | re.DOTALL):
        for term in [*entry.split(","), *re.findall(r"\*([^*]+)\*", body)]:
            found.setdefault(" ".join(term.split()).lower().removesuffix("s"), set()).add(entry)
    return found


def words_of(text: str) -> str:
    """Small letters, names split into words."""
    return re.sub(r"[\s_]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)).lower()


def everything_else() -> str:
    """Sources, and documents on how things are today: no decision, no changelog, not the glossary, not this file."""
    files = [path for path in documents() if path != GLOSSARY and path.name != "CHANGELOG.md"]
    files = [path for path in files if path.parent.name != "decisions"]
    files += [path for path in sources(*PACKAGES, *TESTS) if path.name != "test_glossary.py"]
    return words_of(" ".join(path.read_text(encoding="utf-8") for path in files))


def is_used(term: str, text: str) -> bool:
    """In any form: of a verb or a noun its endings too."""
    word = re.escape(term.lower())
    last = word[-1]
    forms = f"{word}[sd]?|{word[:-1]}ing" if last == "e" else f"{word}(s|es|ed|ing|{last}ed|{last}ing)?"
    return bool(re.search(rf"\b({forms})\b", text))


def test_every_word_of_the_glossary_is_used() -> None:
    text = everything_else()
    assert [term for term in TERMS if not is_used(term, text)] == []


@pytest.mark.parametrize(
    ("term", "text", "used"),
    [
        ("Fence", "behind two fences", True),
        ("Stage", "it is staging", True),
        ("Commit", "was committed", True),
        ("Row slot", "the freed row_slots", True),
        ("Run ahead", "class RunAhead", True),
        ("Plane", "we plan", False),
        ("Note", "they do not", False),
        ("Launch", "a relaunch", False),
        ("Row slot", "a row and a slot", False),
    ],
)
def test_a_use_is_the_word_itself_and_no_other_word(term: str, text: str, used: bool) -> None:
    assert is_used(term, words_of(text)) == used


def test_a_word_has_one_entry() -> None:
    assert len(TERMS) >= 30
    assert [term for term, times in Counter(term.lower() for term in TERMS).items() if times > 1] == []


def test_a_noun_is_defined_once() -> None:
    """Neither a second entry nor the text of another entry gives a noun a second meaning."""
    found = definitions(GLOSSARY.read_text(encoding="utf-8"))
    assert {term: sorted(entries) for term, entries in found.items() if len(entries) > 1} == {}


@pytest.mark.parametrize(
    ("page", "twice"),
    [
        ("**Share.** A block.\n\n**Expert.** Weighted by its *shares*.\n", True),
        ("**Slot.** A place.\n\n## More\n\n**Row, slot.** A request.\n", True),
        ("**Share.** It *shares* a block.\n\n**Expert.** Weighted.\n", False),
    ],
)
def test_a_second_definition_is_seen(page: str, twice: bool) -> None:
    assert any(len(entries) > 1 for entries in definitions(page).values()) == twice


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_who_begins_to_read_is_led_to_the_glossary(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    assert GLOSSARY in {((ROOT / page).parent / link).resolve() for link in links}
