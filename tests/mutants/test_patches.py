"""Every mutant can be put on trial: its patch applies, its header is complete, the tests it names are there."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

from tests.mutants.patches import ROOT, PatchHeaderError, patches, read_mutant
from tests.mutants.trial import CAUGHT, SURVIVED, apply, judge
from tests.mutants.verdicts import Verdict

DOCUMENT = ROOT / "docs/decisions/0006-mutants.md"


def documented() -> dict[str, int]:
    """Mutants named in the table of the decision, with the number of their mistake."""
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", DOCUMENT.read_text(encoding="utf-8"), re.M)
    return {name: int(number) for number, row in rows for name in re.findall(r"`(\d\d+-[a-z0-9-]+)`", row)}


def functions_of(path: Path) -> set[str]:
    """Test functions of a file, and those of classes as Class::function."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.stem)
def test_a_patch_applies(patch: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed, and only git can say whether a patch applies")
    assert apply(patch, ROOT, check=True) == ""


@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.stem)
def test_a_patch_says_what_is_wrong_and_names_tests_that_are_there(patch: Path) -> None:
    mutant = read_mutant(patch)
    assert patch.name.startswith(f"{mutant.number:02}-")
    assert mutant.sentence.endswith(".")
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), f"{path} is not there"
        assert name.partition("[")[0] in functions_of(ROOT / path), f"{path} has no test {name}"


def test_the_decision_lists_every_mutant_under_its_mistake_and_no_other() -> None:
    assert documented() == {mutant.name: mutant.number for mutant in map(read_mutant, patches())}


@pytest.mark.parametrize(
    "header",
    ["", "# mistake 1: a sentence.", "# test: a.py::b", "# mistake one: a sentence.\n# test: a.py::b"],
    ids=["nothing", "no test", "no mistake", "no number"],
)
def test_a_patch_without_its_header_is_refused(tmp_path: Path, header: str) -> None:
    patch = tmp_path / "01-new.patch"
    patch.write_text(f"{header}\ndiff --git a/x b/x\n")
    with pytest.raises(PatchHeaderError, match=r"01-new\.patch must begin with"):
        read_mutant(patch)


def phase(node: str, outcome: str, when: str = "call", error: str = "") -> Verdict:
    return Verdict(node, when, outcome, error)


@pytest.mark.parametrize(
    ("code", "verdicts", "expected"),
    [
        (1, [phase("t.py::f", "failed", error="AssertionError")], CAUGHT),
        (1, [phase("t.py::f[1]", "passed"), phase("t.py::f[2]", "failed", error="LedgerError")], CAUGHT),
        (0, [phase("t.py::f", "passed")], SURVIVED),
        (1, [phase("t.py::f", "failed", error="NameError")], "BROKEN BY ITS PATCH"),
        (1, [phase("t.py::f", "failed", when="setup", error="ValueError")], "BROKEN BY ITS PATCH"),
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
