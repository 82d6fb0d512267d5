"""The files of the running Python's standard library that the bundled model was not trained on (`held_out.json`)."""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HELD_OUT: Final = Path(__file__).with_name("held_out.json")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file. `definitions` are its top-level ones in order, with their decorators, each ending in one newline."""

    path: str
    sha256: str
    text: str
    definitions: tuple[str, ...]


def is_python(text: str) -> bool:
    """Whether `ast` parses the text."""
    return _parsed(text) is not None


def read_file(path: str, text: str, raw: bytes) -> SourceFile | None:
    """None where `ast` refuses it (a file kept for another release)."""
    tree, lines = _parsed(text), text.split("\n")
    if tree is None:
        return None
    found = []
    for node in tree.body:
        if isinstance(node, Definition):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.append("\n".join(line.rstrip() for line in lines[first - 1 : node.end_lineno]) + "\n")
    return SourceFile(path, hashlib.sha256(raw).hexdigest(), text, tuple(found))


def held_out_listing() -> dict[str, Any]:
    """The SHA-256 of each held-out `files` by path, and the release of `python` that they are of."""
    found: dict[str, Any] = json.loads(HELD_OUT.read_text())
    return found


def held_out_files(library: Path | None = None) -> list[SourceFile]:
    """Return the library's source files, sorted by path; none if it comes without source. library: None: this
    Python's."""
    library = standard_library() if library is None else library
    found = []
    for name in sorted(held_out_listing()["files"]):
        if (path := library / name).is_file():
            raw = path.read_bytes()
            file = read_file(name, raw.decode("utf-8").replace("\r\n", "\n"), raw)
            found += [file] if file is not None and file.definitions else []
    return found


def standard_library() -> Path:
    """Where the running Python keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError):
        return None
