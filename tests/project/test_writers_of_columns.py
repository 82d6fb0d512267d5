"""A column of `Rows` is written by its own methods, or by the one module that is declared for it here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from runahead.runtime.scheduler.rows import Rows
from tests.project.repository import PACKAGES, ROOT, name_of, parsed, sources

ROWS: Final = "runtime/scheduler/rows.py"
NEW_ROW: Final = "runtime/scheduler/new_row.py"
# What is fixed when a row begins, and what it is about.
WRITTEN_BY_NEW_ROW: Final = frozenset(
    {
        "handle",
        "logprobs",
        "max_len",
        "may_hold",
        "min_position",
        "needs_full",
        "order",
        "owner",
        "prompt_len",
        "prompt_logprobs",
        "stop_ids",
        "stop_width",
    }
)
# NumPy's methods that return the same memory, or write to their array.
VIEWS: Final = frozenset({"ravel", "reshape", "swapaxes", "transpose", "view"})
WRITES: Final = frozenset({"fill", "itemset", "partition", "put", "resize", "sort"})
FUNCTIONS_THAT_WRITE: Final = frozenset(
    {"copyto", "place", "put", "put_along_axis", "putmask"}
)  # to their first argument


@cache
def columns() -> frozenset[str]:
    return frozenset(name for name in vars(Rows(1, 1, 1)) if not name.startswith("_")) - {"max_rows"}


class Stores:
    """Which columns of `Rows` a function, or a whole file, writes to.

    A column is an attribute of something that is called `rows`, is declared as `Rows`, or is another name of one of
    these. Other names of columns in the file are followed too; a copy, as an index by an array makes it, counts as the
    column, so that nobody needs to know which index copies.
    """

    def __init__(self, tree: ast.AST) -> None:
        self._aliases: dict[str, str] = {}
        self._of_rows = {
            node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            for node in ast.walk(tree)
            if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation and ast.unparse(node.annotation) == "Rows"
        }
        for _ in range(2):  # an alias of an alias
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        self._follow(target, node.value)
        self.found = {column for node in ast.walk(tree) for column in self._written(node)}

    def _follow(self, target: ast.expr, value: ast.expr) -> None:
        """One assignment: what the target is another name of."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._follow(one, its)
        if isinstance(target, ast.Name | ast.Attribute) and self._column(target) is None:
            if self._are_rows(value):
                self._of_rows.add(ast.unparse(target))
            elif column := self._column(value):
                self._aliases[ast.unparse(target)] = column

    def _are_rows(self, node: ast.expr) -> bool:
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        return name in ("rows", "_rows") or ast.unparse(node) in self._of_rows

    def _column(self, node: ast.expr) -> str | None:
        """The column that an expression is, or is a part or a view of."""
        if isinstance(node, ast.Subscript):
            return self._column(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS:
            return self._column(node.func.value)
        if isinstance(node, ast.Attribute) and node.attr in columns() and self._are_rows(node.value):
            return node.attr
        if isinstance(node, ast.Attribute) and node.attr in ("T", "flat", "data"):
            return self._column(node.value)
        return self._aliases.get(ast.unparse(node)) if isinstance(node, ast.Name | ast.Attribute) else None

    def _written(self, node: ast.AST) -> Iterator[str]:
        places: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            places.append(node)
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if ast.unparse(node) not in self._aliases:
                places.append(node)
        elif isinstance(node, ast.AugAssign):
            places.append(node.target)
        elif isinstance(node, ast.Call):
            places += [keyword.value for keyword in node.keywords if keyword.arg == "out"]
            if isinstance(node.func, ast.Attribute):
                if node.func.attr in WRITES:
                    places.append(node.func.value)
                if node.func.attr in FUNCTIONS_THAT_WRITE or node.func.attr == "at":  # np.add.at and its like
                    places += node.args[:1]
        for place in places:
            for part in place.elts if isinstance(place, ast.Tuple) else [place]:
                if (column := self._column(part)) is not None:
                    yield column


def written(path: Path) -> set[str]:
    return Stores(parsed(path)).found


def test_a_column_is_written_by_rows_or_by_the_one_module_that_is_declared_for_it() -> None:
    stores = {name_of(path): written(path) for path in sources(*PACKAGES) if name_of(path) != ROWS}
    assert {name: found for name, found in stores.items() if found} == {NEW_ROW: WRITTEN_BY_NEW_ROW}


def test_every_other_column_is_written_by_methods_of_rows() -> None:
    """The zeros that it begins with aside."""
    methods = [
        ast.unparse(node).replace("self.", "rows.")
        for part in parsed(ROOT / ROWS).body
        if isinstance(part, ast.ClassDef) and part.name == "Rows"
        for node in part.body
        if isinstance(node, ast.FunctionDef) and node.name != "__init__"
    ]
    found = Stores(ast.parse("\n".join(methods))).found
    assert found == columns() - WRITTEN_BY_NEW_ROW


@pytest.mark.parametrize(
    "line",
    [
        "rows.committed_len[slot] = 1",
        "self._rows.committed_len += step",
        "held.rows.committed_len[slots] += 1",
        "rows.prompt_len[0], rows.committed_len[0] = 1, 2",
        "np.add(a, b, out=self.rows.committed_len)",
        "np.add(a, b, out=(rows.committed_len,))",
        "np.put(rows.committed_len, slots, 1)",
        "np.add.at(rows.committed_len, slots, 1)",
        "rows.committed_len.fill(0)",
        "rows.committed_len = other",
        "lengths = rows.committed_len\nlengths[slots] = 1",
        "self._flat = rows.committed_len.reshape(-1)\nself._flat[0] = 1",
        "first = rows.committed_len\nsecond = first[1:]\nsecond += 1",
        "del rows.committed_len[0]",
        "r = self.rows; r.committed_len[0] = 1",
        "self.r = rows\nother = self.r\nother.committed_len += 1",
        "r, n = self._rows, 1\nr.committed_len[0] = n",
        "def f(r: Rows): r.committed_len[0] = 1",
        "self.state: Rows = made()\nself.state.committed_len[0] = 1",
        "(r := self.rows).handle\nr.committed_len[0] = 1",
    ],
)
def test_a_store_to_a_column_is_seen(line: str) -> None:
    assert "committed_len" in Stores(ast.parse(line)).found


@pytest.mark.parametrize(
    "line",
    [
        "lengths = rows.committed_len[slots] + 1\nlengths += 1",
        "self.slots[rows.committed_len[0]] = 1",
        "request.owner = 1",
        "plan.rows = rows.committed_len.copy()",
        "self._lengths = rows.committed_len",
    ],
)
def test_a_store_to_anything_else_is_none(line: str) -> None:
    assert not Stores(ast.parse(line)).found
