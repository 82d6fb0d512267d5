"""A file of the product holds one idea, and a function can be seen at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.project.repository import KERNELS, PACKAGES, TESTS, TOOLS, name_of, parsed, sources

FILE_LINES, FUNCTION_LINES = 400, 70


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length in lines, decorators left out, of each function."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_no_source_file_is_too_long() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*PACKAGES, *TOOLS)}
    assert len(lengths) > 100, "the folders are not where they are looked for"
    assert not {path: lines for path, lines in lengths.items() if lines > FILE_LINES}


def test_no_function_is_too_long() -> None:
    kernels = set(sources(*KERNELS))
    long = {
        f"{name_of(path)}: {name}": lines
        for path in sources(*PACKAGES, *TOOLS, *TESTS)
        if path not in kernels
        for name, lines in functions(path)
        if lines > FUNCTION_LINES
    }
    assert not long


def test_the_lengths_of_functions_are_seen() -> None:
    assert dict(functions(Path(__file__)))["test_the_lengths_of_functions_are_seen"] == 2
