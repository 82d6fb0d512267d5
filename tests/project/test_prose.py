"""Counts of wrong phrases, wrong docstrings and long documents: none rises, and none is left above what is there."""

from __future__ import annotations

import subprocess
from functools import cache

import pytest

from tests.project.prose import (
    DECISIONS,
    PHRASES,
    allowed,
    begins_wrongly,
    counts,
    finds,
    phrases_in,
    private_words_in,
    words_in,
)
from tests.project.repository import ROOT

KINDS = (
    "phrases in documents",
    "phrases in sources",
    "private words in the product",
    "first lines of docstrings",
    "words of decisions",
)
SLACK = 10  # a count this far above what is there has to be lowered
MOST_WORDS_IN_DOCS = 60_000
CHANGED = ("git", "diff", "--name-only", "HEAD")


@cache
def found() -> dict[str, dict[str, int]]:
    return counts()


@pytest.mark.parametrize("kind", KINDS)
def test_no_count_rises(kind: str) -> None:
    """A better sentence is the answer: subject, verb, object, the noun named."""
    limits = allowed()[kind]
    raised = {name: count for name, count in found()[kind].items() if count > limits.get(name, 0)}
    if raised:
        pytest.fail("\n".join(_told(kind, name, count, limits.get(name, 0)) for name, count in raised.items()))


def _told(kind: str, name: str, count: int, limit: int) -> str:
    """Say where all of a count's finds are, those in changed files first."""
    changed = set(subprocess.run(CHANGED, cwd=ROOT, capture_output=True, text=True).stdout.split())
    places = sorted(finds().get(kind, {}).get(name, ()), key=lambda place: place.partition(":")[0] not in changed)
    return f"{kind}: {name}: {count}, and at most {limit}: {', '.join(places)}"


@pytest.mark.parametrize("kind", KINDS[:4])
def test_a_count_that_has_fallen_is_written_down(kind: str) -> None:
    """`python -m tests.project.prose >tests/project/prose.json` writes it."""
    there = found()[kind]
    assert {name: limit for name, limit in allowed()[kind].items() if limit - there.get(name, 0) > SLACK} == {}


def test_the_documents_have_at_most_60_000_words_beside_the_table_of_mutants() -> None:
    paths = [path for path in (ROOT / "docs").rglob("*.md") if path != DECISIONS / "0006-mutants.md"]
    assert sum(words_in(path.read_text(encoding="utf-8")) for path in paths) <= MOST_WORDS_IN_DOCS


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_is_seen_across_lines_and_comment_signs(phrase: str) -> None:
    text = f"# A sentence with {phrase.title()} in it.\n".replace(" ", "\n    # ")
    assert phrase in [found for found, _ in phrases_in(text)]


def test_words_that_only_contain_a_phrase_are_not_counted() -> None:
    assert not [*phrases_in("thoseof, hangs once, untold; and so isolated")]


def test_a_private_word_is_seen_in_prose_and_in_names_and_no_longer_word_is() -> None:
    found = [*private_words_in("A row is held. self._shared_places\n = HELD  # upheld, outlook, replaced")]
    assert found == [("held", 1), ("places", 1), ("held", 2)]


def test_a_count_that_rises_names_each_line() -> None:
    told = _told("private words in the product", "held", 1, 0)
    assert "service/shared_memory/board.py:" in told and told.startswith("private words in the product: held: 1,")
    places = finds()["first lines of docstrings"]
    assert sum(map(len, places.values())) == sum(found()["first lines of docstrings"].values())


@pytest.mark.parametrize(
    "first_line", ["Of a product.", "Of two.", "rows: of a launch.", "`seed`, rows: both.", "x [n]: y."]
)
def test_a_first_line_that_names_a_parameter_or_begins_with_of_is_seen(first_line: str) -> None:
    assert begins_wrongly(first_line)


@pytest.mark.parametrize("first_line", ["Bracket each row's threshold.", "Often used.", "The rows: all of them."])
def test_a_first_line_that_says_what_the_thing_is_is_none_of_them(first_line: str) -> None:
    assert not begins_wrongly(first_line)
