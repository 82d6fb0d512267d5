"""Flags of a completion's structure, of which at most one may be given."""

from __future__ import annotations

import argparse
from typing import Final

from runahead.runtime.wire.setting import shown
from runahead.service.settings.bounded_files import FileError, read_text
from runahead.v1 import Choice, Structure

_MOST_BYTES: Final = 16 << 20  # of a file
_FLAGS: Final = ("json_schema", "json_object", "regex", "choice", "grammar", "ebnf")


def add_structure_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each kind of structure."""
    parser.add_argument(
        "--json-schema", metavar="FILE", help="a text of JSON that is valid by the JSON Schema in a file"
    )
    parser.add_argument("--json-object", action="store_true", default=None, help="an object of JSON, whatever is in it")
    parser.add_argument("--regex", metavar="TEXT", help="a text that all of this regular expression matches")
    parser.add_argument("--choice", action="append", metavar="TEXT", help="one of several texts; may be repeated")
    parser.add_argument("--grammar", metavar="FILE", help="a text of the grammar in a file, in the words of Lark")
    parser.add_argument("--ebnf", metavar="FILE", help="a text of the grammar in a file, in EBNF (GBNF)")


def structure_of(arguments: argparse.Namespace) -> Structure | None:
    """Return the flags' structure, None without one. Raises ValueError that names the flag."""
    given = {name: value for name in _FLAGS if (value := getattr(arguments, name, None)) is not None}
    if not given:
        return None
    if len(given) > 1:
        flags = " and ".join(map(_flag, given))
        raise ValueError(f"{flags} can't be given together: a completion has one structure")
    ((name, value),) = given.items()
    if name in ("json_schema", "grammar", "ebnf"):
        value = _read(name, value)
    try:
        structure = Structure(choice=Choice(texts=value) if name == "choice" else None)
        if name != "choice":
            setattr(structure, name, value)
        return structure
    except ValueError as error:  # an invalid character
        raise ValueError(f"{_flag(name)} must be text in UTF-8, and is {shown(value)}") from error


def _read(name: str, path: str) -> str:
    try:
        return read_text(path, _MOST_BYTES)
    except FileError as error:
        raise ValueError(f"{_flag(name)} must be a file that can be read, and is {shown(path)}: {error}") from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
