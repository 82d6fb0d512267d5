"""The mutants: TOML tables beside this file, one file for each area. Each mutant puts one known mistake into the code.

[01-one-buffer]
sentence = "Every launch stages its tokens in the same buffer."
tests = ["tests/runtime/engine/test_chain.py::test_name"]    # each must fail
file = "runtime/engine/loop.py"
old = 'rings.bulk[ring_slot]'    # found exactly once in the file
new = 'rings.bulk[0]'
[[01-one-buffer.also]]    # further edits, made after the first
file = "runtime/programs/cpu/rows.py"
old = 'rings.bulk[slot]'
new = 'rings.bulk[0]'
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent
ROOT: Final = FOLDER.parents[1]

_NAME: Final = re.compile(r"\d\d+(-[a-z0-9]+)+")
_EDIT: Final = {"file", "old", "new"}
_KEYS: Final = _EDIT | {"sentence", "tests"}


class TableError(ValueError):
    """A table does not describe its mutants completely."""


class NoLongerAppliesError(ValueError):
    """The old text of an edit is not in its file, or is there more than once."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One replacement. file: path inside the repository. old: text that the file has exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One known mistake. sentence: what is wrong. tests: node ids, each of which must fail with it."""

    name: str
    sentence: str
    tests: tuple[str, ...]
    edits: tuple[Edit, ...]


def read_table(path: Path) -> list[Mutant]:
    """The mutants of one TOML file, in the file's order. Raises TableError."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{path.name} is not TOML: {error}") from error
    return [_mutant(f"{path.name}, {name}", name, entry) for name, entry in entries.items()]


def read_mutants() -> list[Mutant]:
    """All mutants by number. Raises TableError."""
    mutants = [mutant for path in sorted(FOLDER.glob("*.toml")) for mutant in read_table(path)]
    names = [mutant.name for mutant in mutants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise TableError(f"more than one mutant has the name {', '.join(sorted(twice))}")
    return sorted(mutants, key=lambda mutant: (int(mutant.name.partition("-")[0]), mutant.name))


def mutated(mutant: Mutant, tree: Path) -> dict[str, str]:
    """The new text of each file that the mutant changes, by path inside the tree. Raises NoLongerAppliesError."""
    texts: dict[str, str] = {}
    for edit in mutant.edits:
        if edit.file not in texts:
            if not (tree / edit.file).is_file():
                raise NoLongerAppliesError(f"{mutant.name}: there is no file {edit.file}")
            texts[edit.file] = (tree / edit.file).read_bytes().decode()
        if (times := texts[edit.file].count(edit.old)) != 1:
            raise NoLongerAppliesError(f"{mutant.name}: {edit.file} has the old text {times} times, not once")
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    return texts


def apply(mutant: Mutant, tree: Path) -> None:
    """Change the files of a tree. Raises NoLongerAppliesError before any change."""
    for file, text in mutated(mutant, tree).items():
        (tree / file).write_bytes(text.encode())


def _mutant(place: str, name: str, entry: dict[str, Any]) -> Mutant:
    if not _NAME.fullmatch(name):
        raise TableError(f"{place}: a name is a number and lowercase words, joined by hyphens")
    also = entry.pop("also", [])
    tests = entry.get("tests")
    if not isinstance(tests, list) or not tests or not all("::" in str(test) for test in tests):
        raise TableError(f"{place}: tests must be a list of at least one node id")
    first = {key: entry.pop(key) for key in _EDIT & entry.keys()}
    if entry.keys() != _KEYS - _EDIT or not str(entry["sentence"]).endswith("."):
        raise TableError(f"{place}: the keys are {', '.join(sorted(_KEYS))} and also; a sentence ends with a period")
    return Mutant(name, entry["sentence"], tuple(tests), tuple(_edit(place, edit) for edit in (first, *also)))


def _edit(place: str, entry: dict[str, Any]) -> Edit:
    if entry.keys() != _EDIT or not all(isinstance(text, str) for text in entry.values()):
        raise TableError(f"{place}: an edit has the strings file, old and new")
    if not entry["old"] or entry["old"] == entry["new"]:
        raise TableError(f"{place}: old must be text, and new another one")
    return Edit(**entry)
