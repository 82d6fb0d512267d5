"""Every mutant can be put on trial: it applies, its entry is complete, the tests it names are there."""

from __future__ import annotations

import ast
import builtins
import symtable
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.tables import ROOT, NoLongerAppliesError, TableError, apply, mutated, read_mutants, read_table
from tests.mutants.trial import CAUGHT, SURVIVED, judge
from tests.mutants.verdicts import Verdict

ENTRY = """
[01-two]
sentence = "Two becomes three."
tests = ["tests/a.py::test_b"]
file = "a.txt"
old = "two"
new = "three"
[[01-two.also]]
file = "a.txt"
old = "one\\n"
new = ""
"""


@cache
def functions_of(path: Path) -> set[str]:
    """Test functions of a file, and those of classes as Class::function."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def test_every_mutant_applies() -> None:
    problems = []
    for mutant in read_mutants():
        try:
            mutated(mutant, ROOT)
        except NoLongerAppliesError as error:
            problems.append(str(error))
    assert problems == []


def test_every_test_that_a_mutant_names_is_there() -> None:
    missing = []
    for mutant in read_mutants():
        for test in mutant.tests:
            path, _, name = test.partition("::")
            if not (ROOT / path).is_file() or name.partition("[")[0] not in functions_of(ROOT / path):
                missing.append(f"{mutant.name}: {test}")
    assert missing == []


def test_no_mutant_leaves_code_that_can_not_run() -> None:
    """Syntax and unknown names. A test that fails by these has not met the mistake."""
    unknown = {
        (mutant.name, name)
        for mutant in read_mutants()
        for file, text in mutated(mutant, ROOT).items()
        if file.endswith(".py")
        for name in unknown_names(text)
    }
    assert unknown == set()


def unknown_names(source: str) -> set[str]:
    """Return names that a module reads and that neither it nor Python defines. Raises SyntaxError."""
    module = symtable.symtable(source, "a module", "exec")
    known = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    known |= {symbol.get_name() for symbol in module.get_symbols() if symbol.is_namespace()}
    found, tables = set(), [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        of_module = table is module
        found |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (of_module or symbol.is_global())
        }
        known |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_declared_global()}
    return found - known - set(dir(builtins)) - {"__file__", "__path__"}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(a):\n    return a + b", {"b"}),
        ("import b\ndef f(a):\n    return [c for c in a if b and len(c)]", set()),
        ("class A:\n    x = y\nprint(A, __name__)", {"y"}),
    ],
)
def test_names_that_nobody_defines_are_found(source: str, names: set[str]) -> None:
    assert unknown_names(source) == names


def test_edits_are_made_in_order(tmp_path: Path) -> None:
    (tmp_path / "01.toml").write_text(ENTRY)
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (mutant,) = read_table(tmp_path / "01.toml")
    apply(mutant, tmp_path)
    assert (tmp_path / "a.txt").read_text() == "three\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\nthree\n", r"a\.txt has the old text 0 times, not once"),
        ("one\ntwo\ntwo\n", r"a\.txt has the old text 2 times, not once"),
        (None, r"there is no file a\.txt"),
    ],
    ids=["gone", "twice", "no file"],
)
def test_a_mutant_whose_old_text_is_not_there_once_changes_nothing(
    tmp_path: Path, text: str | None, message: str
) -> None:
    (tmp_path / "01.toml").write_text(ENTRY)
    (mutant,) = read_table(tmp_path / "01.toml")
    if text is not None:
        (tmp_path / "a.txt").write_text(text)
    with pytest.raises(NoLongerAppliesError, match=f"01-two: .*{message}"):
        apply(mutant, tmp_path)
    assert text is None or (tmp_path / "a.txt").read_text() == text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[01-two", "[two", "a name is a number and lowercase words"),
        ('["tests/a.py::test_b"]', "[]", "at least one node id"),
        ('["tests/a.py::test_b"]', '["tests/a.py"]', "at least one node id"),
        ('sentence = "Two becomes three."', "", "the keys are"),
        ("three.", "three", "ends with a period"),
        ('sentence = "', 'sentense = "', "the keys are"),
        ('file = "a.txt"\nold = "one', 'old = "one', "file, old and new"),
        ('new = "three"', 'new = "two"', "new another one"),
        ('new = "three"', "new = ", "is not TOML"),
    ],
    ids=["name", "no test", "no node", "no sentence", "no period", "misspelled", "no file", "no change", "no TOML"],
)
def test_an_entry_that_is_not_complete_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in ENTRY
    (tmp_path / "01.toml").write_text(ENTRY.replace(old, new))
    with pytest.raises(TableError, match=message):
        read_table(tmp_path / "01.toml")


def phase(node: str, outcome: str, when: str = "call", error: str = "") -> Verdict:
    return Verdict(node, when, outcome, error)


@pytest.mark.parametrize(
    ("code", "verdicts", "expected"),
    [
        (1, [phase("t.py::f", "failed", error="AssertionError")], CAUGHT),
        (1, [phase("t.py::f[1]", "passed"), phase("t.py::f[2]", "failed", error="LedgerError")], CAUGHT),
        (0, [phase("t.py::f", "passed")], SURVIVED),
        (1, [phase("t.py::f", "failed", error="NameError")], "BROKEN BY ITS EDIT"),
        (1, [phase("t.py::f", "failed", when="setup", error="ValueError")], "BROKEN BY ITS EDIT"),
        (0, [phase("t.py::f", "skipped", when="setup")], "DID NOT RUN (pytest ended with 0)"),
        (2, [], "DID NOT RUN (pytest ended with 2)"),
        (1, [phase("t.py::fg", "failed", error="AssertionError")], "DID NOT RUN (pytest ended with 1)"),
        (-1, [], "HUNG"),
    ],
    ids=[
        "fails",
        "fails once",
        "passes",
        "no such name",
        "fails before it begins",
        "skipped",
        "no import",
        "another",
        "hangs",
    ],
)
def test_only_a_test_that_runs_and_fails_has_caught_a_mutant(code: int, verdicts: list[Verdict], expected: str) -> None:
    assert judge("t.py::f", code, verdicts)[0] == expected
