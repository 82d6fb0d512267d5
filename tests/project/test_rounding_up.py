"""Division that rounds up is spelled out once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

import pytest

from tests.project.repository import KERNELS, PACKAGES, TOOLS, name_of, parsed, sources

HELPER: Final = "runtime/rounding.py"


def is_negative(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def rounds_up(node: ast.AST) -> bool:
    """-(-a // b), or (a + b - 1) // b in any order, or (a + 31) // 32."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.BinOp):
        division = node.operand
        first = division.left
        while isinstance(first, ast.BinOp):  # -a * b // c is (-a * b) // c
            first = first.left
        return isinstance(division.op, ast.FloorDiv) and is_negative(first)
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)):
        return False
    terms = dict(signed_terms(node.left))
    size = ast.unparse(node.right)
    if size.isdigit():
        return terms.get(str(int(size) - 1)) == 1 and len(terms) > 1
    return terms.get(size) == 1 and any(term.isdigit() and sign < 0 for term, sign in terms.items())


def signed_terms(node: ast.expr, sign: int = 1) -> Iterator[tuple[str, int]]:
    """What a sum is made of, each with its sign."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield from signed_terms(node.left, sign)
        yield from signed_terms(node.right, sign if isinstance(node.op, ast.Add) else -sign)
    else:
        yield ast.unparse(node), sign


def files_that_round_up() -> dict[str, list[int]]:
    """Lines by file. Kernels have a division of their own, `tl.cdiv`."""
    kernels = set(sources(*KERNELS))
    lines = {
        name_of(path): [
            node.lineno for node in ast.walk(parsed(path)) if isinstance(node, ast.expr) and rounds_up(node)
        ]
        for path in sources(*PACKAGES, *TOOLS)
        if path not in kernels
    }
    return {name: found for name, found in lines.items() if found}


def test_division_that_rounds_up_is_spelled_out_in_its_helper_alone() -> None:
    assert files_that_round_up().keys() == {HELPER}


@pytest.mark.parametrize(
    "line",
    ["-(-a // b)", "x * -(-a.b // 16)", "(a + b - 1) // b", "(a + (b - 1)) // b", "(b - 2 + a) // b", "(a + 31) // 32"],
)
def test_a_spelling_is_seen(line: str) -> None:
    assert any(rounds_up(node) for node in ast.walk(ast.parse(line)))


@pytest.mark.parametrize(
    "line", ["-a // b", "-(a // b)", "(a + 1) // b", "(a - 1) // b", "31 // 32", "(a // b + 1) * b"]
)
def test_other_divisions_are_none(line: str) -> None:
    assert not any(rounds_up(node) for node in ast.walk(ast.parse(line)))
