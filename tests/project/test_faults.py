"""The table of faults names tests that are there, and every attack."""

from __future__ import annotations

import re
from typing import Final

from tests.mutants.test_tables import functions_of
from tests.project.repository import ROOT
from tests.service.hostile.attacks import ATTACKS

TABLE: Final = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
NODE: Final = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)(?:\[(\w+)\])?`")


def rows() -> list[list[str]]:
    """Cells of each row: fault, promise, what a caller sees, tests."""
    found = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| ")]
    return [cells for cells in found if cells[0] != "fault"]


def test_every_fault_has_a_promise_something_to_see_and_a_test() -> None:
    assert len(rows()) > 50
    for cells in rows():
        assert len(cells) == 4 and all(cells), cells
        assert NODE.sub("", cells[3]).strip(", ") == "", f"of {cells[0]!r}, some of the tests are none"
        assert NODE.search(cells[3]), cells[0]


def test_every_test_that_the_table_names_is_there() -> None:
    missing = [
        f"{path}::{name}"
        for path, name, _ in NODE.findall(TABLE)
        if not (ROOT / path).is_file() or name not in functions_of(ROOT / path)
    ]
    assert missing == []


def test_every_attack_is_in_the_table_and_no_other() -> None:
    assert {attack for _, _, attack in NODE.findall(TABLE) if attack} == set(ATTACKS)
