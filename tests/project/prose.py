"""Counts of phrases without a right use, private words, docstrings that begin wrongly, and words of documents.

`python -m tests.project.prose >tests/project/prose.json` writes the counts as they are. They may only fall.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.project.repository import PACKAGES, ROOT, TESTS, TOOLS, documents, name_of, parsed, sources

COUNTS: Final = Path(__file__).with_name("prose.json")
DECISIONS: Final = ROOT / "docs" / "decisions"
FOLDERS: Final = (*PACKAGES, *TOOLS, *TESTS)
MOST_WORDS: Final = 600  # of a decision record: one page
PHRASES: Final = (
    "of its own",
    "of their own",
    "those that",
    "those who",
    "those of",
    "that of",
    "as many as",
    "hang on",
    "hangs on",
    "hung on",
    "whoever",
    "whatever it is",
    "whatever they are",
    "is told",
    "are told",
    "was told",
    "were told",
    "is said of",
    "are said of",
    "to be had",
    "reckon",
    "reckons",
    "reckoned",
    "for want of",
    "by way of",
    "so does",
    "and so is",
    "and so are",
    "and so do",
    "and so has",
    "neither does",
)
# Words with another meaning than the field's, or with several. What is left of them in the product may only fall.
PRIVATE_WORDS: Final = (
    *(
        "border",
        "borders",
        "course",
        "courses",
        "door",
        "doors",
        "held",
        "holder",
        "holders",
        "look",
        "looked",
        "looks",
    ),
    *("meet", "meets", "place", "places", "share", "shares", "turn", "turns"),
)
_WORD: Final = re.compile(r"[a-z]+")
_BREAK: Final = re.compile(r"\s*\n\s*(?:#|//)?\s*")
_PHRASE: Final = re.compile(rf"\b(?:{'|'.join(sorted(PHRASES, key=len, reverse=True))})\b")
_PARAMETER: Final = re.compile(r"`?[A-Za-z_]\w*`?(, `?[A-Za-z_]\w*`?)*( \[[^\]]*\])?: ")
_OF: Final = re.compile(r"Of\b")


def phrases_in(text: str) -> Counter[str]:
    """How often each phrase is in a text, across line breaks and comment signs, in any case."""
    return Counter(_PHRASE.findall(_BREAK.sub(" ", text.lower())))


def private_words_in(text: str) -> Counter[str]:
    """How often each private word is in a text, also as a part of a name, as in `held_places`."""
    return Counter(word for word in _WORD.findall(text.lower()) if word in PRIVATE_WORDS)


def begins_wrongly(docstring: str) -> bool:
    """Whether a docstring's first line names a parameter, or begins with "Of", before it says what the thing is."""
    return bool(_PARAMETER.match(docstring) or _OF.match(docstring))


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield text


def words_in(text: str) -> int:
    """Words between blanks, as `wc -w` counts them."""
    return len(text.split())


def _read(paths: Iterable[Path]) -> Iterator[str]:
    yield from (path.read_text(encoding="utf-8") for path in paths if path != Path(__file__))


def counts() -> dict[str, dict[str, int]]:
    """All counts: phrases by document, phrases in sources, first lines by folder, words of long decision records."""
    in_documents = {name_of(path): sum(phrases_in(path.read_text(encoding="utf-8")).values()) for path in documents()}
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    in_sources: Counter[str] = sum((phrases_in(text) for text in _read([*sources(*FOLDERS), *protos])), Counter())
    first_lines = {
        folder: sum(begins_wrongly(text) for path in sources(folder) for text in docstrings(parsed(path)))
        for folder in FOLDERS
    }
    private: Counter[str] = sum((private_words_in(text) for text in _read(sources(*PACKAGES))), Counter())
    words = {path.name: words_in(path.read_text(encoding="utf-8")) for path in sorted(DECISIONS.glob("*.md"))}
    return {
        "phrases in documents": {name: count for name, count in in_documents.items() if count},
        "phrases in sources": dict(sorted(in_sources.items())),
        "private words in the product": dict(sorted(private.items())),
        "first lines of docstrings": first_lines,
        "words of decisions": {name: count for name, count in words.items() if count > MOST_WORDS},
    }


def allowed() -> Mapping[str, Mapping[str, int]]:
    """Counts that may not be exceeded."""
    found: Mapping[str, Mapping[str, int]] = json.loads(COUNTS.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    print(json.dumps(counts(), indent=2))
