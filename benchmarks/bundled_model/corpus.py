"""The corpus of the bundled model: the top-level definitions of the running Python's standard library.

Files are train, dev or held out by a hash of their path alone, so the split is the same in every Python release.
Only held-out files are ever scored.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bundled_model.licences import library_files, reason_to_leave_out

HELD_OUT_OF = 20  # one path in 20 is held out,
DEV_OF = 40  # and one in 40 picks the checkpoint
SPLITS = ("train", "dev", "held_out")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file that may be used. `definitions` are its top-level ones in order, each ending in one newline."""

    path: str
    split: str  # "train", "dev" or "held_out"
    sha256: str
    text: str
    definitions: tuple[str, ...]
    methods: tuple[str, ...]  # functions inside classes, moved to the left margin


def split_of(path: str) -> str:
    """The split of a file, from the SHA-256 of its path relative to the library, with slashes."""
    number = int.from_bytes(hashlib.sha256(path.encode()).digest(), "big")
    if number % HELD_OUT_OF == 0:
        return "held_out"
    return "dev" if number % DEV_OF == 1 else "train"


def source_of(node: Definition, lines: list[str]) -> str:
    """The lines of a definition with its decorators, moved to the left margin."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    margin = " " * node.col_offset
    body = [line.removeprefix(margin) for line in lines[first - 1 : node.end_lineno]]
    return "\n".join(line.rstrip() for line in body) + "\n"


def is_python(text: str) -> bool:
    """Whether `ast` parses the text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def read_file(path: str, text: str, raw: bytes) -> SourceFile | None:
    """The definitions and methods of a file; None where `ast` refuses it (a file kept for another release)."""
    if not is_python(text):
        return None
    lines = text.split("\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    definitions: list[str] = []
    methods: list[str] = []
    for node in tree.body:
        if isinstance(node, Definition):
            definitions.append(source_of(node, lines))
        if isinstance(node, ast.ClassDef):
            functions = (part for part in ast.walk(node) if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
            methods.extend(part for part in (source_of(function, lines) for function in functions) if is_python(part))
    digest = hashlib.sha256(raw).hexdigest()
    return SourceFile(path, split_of(path), digest, text, tuple(definitions), tuple(methods))


def collect(library: Path, splits: Sequence[str] = SPLITS) -> tuple[list[SourceFile], dict[str, str]]:
    """The files of these splits that may be used, sorted by path, and why each of the others is left out."""
    files: list[SourceFile] = []
    left_out: dict[str, str] = {}
    for path, text, raw in library_files(library):
        if split_of(path) not in splits:
            continue
        reason = reason_to_leave_out(path, text)
        if reason is None:
            file = read_file(path, text, raw)
            if file is None:
                left_out[path] = "not Python of this release"
            elif file.definitions:
                files.append(file)
            else:
                left_out[path] = "no top-level definition"
        else:
            left_out[path] = reason
    return files, left_out


def held_out_files() -> list[SourceFile]:
    """Those of the running Python's standard library, sorted by path; none where it comes without its source."""
    return collect(standard_library(), ("held_out",))[0]


def standard_library() -> Path:
    """Where the running Python keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))
