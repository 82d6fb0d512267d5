"""What docs/architecture.md tells a newcomer to read is there, is short, and does what the page says."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Final

from tests.project.repository import PACKAGES, ROOT, parsed, sources

PAGE: Final = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
READING: Final = re.findall(r"^\| \[`([^`]+)`\]\(\.\./([^)]+)\) \| (\d+) \|", PAGE, re.MULTILINE)
MOST_LINES: Final = 2000
NAMED: Final = sorted(set(re.findall(r"`([A-Z]\w+)\.(\w+)`", PAGE)))


def lines_of(path: str) -> int:
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


@cache
def attributes() -> dict[str, set[str]]:
    """Names in the bodies of classes: methods, fields, and those of a class of the same name in another file too."""
    found: dict[str, set[str]] = {}
    for path in sources(*PACKAGES):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                names = found.setdefault(node.name, set())
                names.update(
                    item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
                )
                names.update(ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign))
    return found


def test_the_reading_order_has_fewer_than_2000_lines() -> None:
    assert len(READING) > 8
    assert all(shown == linked for shown, linked, _ in READING)
    assert sum(lines_of(path) for path, _, _ in READING) < MOST_LINES


def test_the_reading_order_names_files_about_as_long_as_they_are() -> None:
    wrong = {path: lines_of(path) for path, _, said in READING if abs(lines_of(path) - int(said)) > 20 + int(said) // 5}
    assert wrong == {}


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`((?:cuda_graphs|runtime|service|protos|tests|benchmarks)/[\w/.-]*)`", PAGE))
    assert len(named) > 20
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_every_method_that_the_page_names_is_there() -> None:
    assert len(NAMED) > 30
    assert [f"{owner}.{name}" for owner, name in NAMED if name not in attributes().get(owner, ())] == []
