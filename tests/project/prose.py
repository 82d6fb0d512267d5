"""Counts of phrases without a right use, private words, docstrings that begin wrongly, and words of documents.

`python -m tests.project.prose >tests/project/prose.json` writes the counts as they are. They may only fall.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
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
_BREAK: Final = r"\s*\n\s*(?:#|//)?\s*"
_PHRASE: Final = re.compile(
    rf"\b(?:{'|'.join(sorted(PHRASES, key=len, reverse=True))})\b".replace(" ", f"(?: |{_BREAK})")
)
_PARAMETER: Final = re.compile(r"`?[A-Za-z_]\w*`?(, `?[A-Za-z_]\w*`?)*( \[[^\]]*\])?: ")
_OF: Final = re.compile(r"Of\b")


def phrases_in(text: str) -> Iterator[tuple[str, int]]:
    """Phrases in a text, across line breaks and comment signs, in any case, each with its line."""
    text = text.lower()
    for found in _PHRASE.finditer(text):
        yield re.sub(_BREAK, " ", found[0]), _line(text, found.start())


def private_words_in(text: str) -> Iterator[tuple[str, int]]:
    """Private words in a text, also as parts of names, as in `held_places`, each with its line."""
    text = text.lower()
    for found in _WORD.finditer(text):
        if found[0] in PRIVATE_WORDS:
            yield found[0], _line(text, found.start())


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def begins_wrongly(docstring: str) -> bool:
    """Whether a docstring's first line names a parameter, or begins with "Of", before it says what the thing is."""
    return bool(_PARAMETER.match(docstring) or _OF.match(docstring))


def docstrings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Docstrings of a module, its classes and its functions, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield text, node.body[0].lineno


def words_in(text: str) -> int:
    """Words between blanks, as `wc -w` counts them."""
    return len(text.split())


@cache
def finds() -> dict[str, dict[str, list[str]]]:
    """Where the wrong phrases, words and first lines are, as `file:line`, by kind and by document, text or folder."""
    texts = {path: path.read_text(encoding="utf-8") for path in documents()}
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    return {
        "phrases in documents": {
            name_of(path): places for path, text in texts.items() if (places := _places(path, phrases_in(text)))
        },
        "phrases in sources": _by_text([*sources(*FOLDERS), *protos], phrases_in),
        "private words in the product": _by_text(sources(*PACKAGES), private_words_in),
        "first lines of docstrings": {
            folder: [
                f"{name_of(path)}:{line}"
                for path in sources(folder)
                for text, line in docstrings(parsed(path))
                if begins_wrongly(text)
            ]
            for folder in FOLDERS
        },
    }


def _places(path: Path, found: Iterable[tuple[str, int]]) -> list[str]:
    return [f"{name_of(path)}:{line} ({text})" for text, line in found]


def _by_text(paths: Iterable[Path], found_in: Callable[[str], Iterator[tuple[str, int]]]) -> dict[str, list[str]]:
    by_text: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        if path != Path(__file__):
            for text, line in found_in(path.read_text(encoding="utf-8")):
                by_text[text].append(f"{name_of(path)}:{line}")
    return dict(sorted(by_text.items()))


def counts() -> dict[str, dict[str, int]]:
    """All counts: phrases by document, phrases in sources, first lines by folder, words of long decision records."""
    words = {path.name: words_in(path.read_text(encoding="utf-8")) for path in sorted(DECISIONS.glob("*.md"))}
    return {
        **{kind: {name: len(places) for name, places in found.items()} for kind, found in finds().items()},
        "words of decisions": {name: count for name, count in words.items() if count > MOST_WORDS},
    }


def allowed() -> Mapping[str, Mapping[str, int]]:
    """Counts that may not be exceeded."""
    found: Mapping[str, Mapping[str, int]] = json.loads(COUNTS.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    print(json.dumps(counts(), indent=2))
