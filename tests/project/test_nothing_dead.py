"""Nothing lies about that nobody uses."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.project.repository import (
    ENTRY_POINTS,
    PACKAGES,
    ROOT,
    TESTS,
    TOOLS,
    module_of,
    names_used,
    parsed,
    sources,
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("_")


def defined(path: Path, *, attributes: bool) -> Iterator[str]:
    """Private names that a file gives to something. attributes: those given to objects, too."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif attributes and isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def read(path: Path) -> Iterator[str]:
    """Names that a file reads, calls or imports. What is only written to is not among them."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def unread(defining: Iterable[Path], reading: Iterable[Path], *, attributes: bool) -> dict[str, Path]:
    """Private names, and a file of each, that are defined and read nowhere."""
    found = {name: path for path in defining for name in defined(path, attributes=attributes)}
    used = {name for path in reading for name in read(path)}
    return {name: path for name, path in found.items() if is_private(name) and name not in used}


def test_no_private_name_of_the_product_is_without_a_reader_in_the_product() -> None:
    product = list(sources(*PACKAGES))
    assert not unread(product, product, attributes=True)


def test_no_private_name_of_tests_and_tools_is_without_a_reader() -> None:
    """Attributes aside: a test may replace what a product's object holds."""
    others = list(sources(*TESTS, *TOOLS))
    assert not unread(others, [*others, *sources(*PACKAGES)], attributes=False)


def test_names_that_are_written_and_never_read_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "class Some:\n"
        "    def __init__(self):\n        self._read, self._counted = 0, 0\n"
        "    def more(self):\n        self._counted += self._read\n"
        "    def _called_by_nobody(self): ...\n"
    )
    assert unread([file], [file], attributes=True).keys() == {"_counted", "_called_by_nobody"}
    assert unread([file], [file], attributes=False).keys() == {"_called_by_nobody"}


def strings_of(path: Path) -> set[str]:
    """Strings of a file: a module that is loaded when it is wanted is named by one."""
    nodes = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant))
    return {node.value for node in nodes if isinstance(node.value, str)}


def reached() -> set[str]:
    """Modules that the entry points import, or name in a string, at any depth, wherever in a file that stands."""
    modules = {module_of(path): path for path in sources(*PACKAGES, *TOOLS)}
    found: set[str] = set()
    waiting = [module_of(ROOT / entry) for entry in ENTRY_POINTS]
    while waiting:
        name = waiting.pop()
        while name:  # importing a.b imports a
            if name in modules and name not in found:
                found.add(name)
                waiting += names_used(modules[name]) | strings_of(modules[name])
            name = name.rpartition(".")[0]
    return found


def test_every_entry_point_is_there() -> None:
    assert [entry for entry in ENTRY_POINTS if not (ROOT / entry).is_file()] == []


def test_every_module_of_the_product_is_reached_from_an_entry_point() -> None:
    modules = {module_of(path) for path in sources(*PACKAGES)}
    assert len(modules) > 100, "the folders are not where they are looked for"
    assert not modules - reached()
