"""A sampling parameter is declared in one place, and adding one touches the few files that a document names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from runtime.row_record import RowParameters
from runtime.row_state import RowState

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("cuda_graphs", "runtime", "service")
MOST_FILES: Final = 8
# Those that nothing but the sampler looks at.
PLAIN: Final = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")


@cache
def names_in_the_product() -> dict[str, frozenset[str]]:
    """Identifiers, and strings that are one, by the path of a file."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): frozenset(names_in(path.read_text(encoding="utf-8"))) for path in paths}


def names_in(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        for attribute in ("id", "attr", "arg", "value"):
            name = getattr(node, attribute, None)
            if isinstance(name, str):
                found.add(name)
    return found


def files_of_the_document() -> set[str]:
    """What docs/architecture.md says that a new sampling parameter touches."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## To add a sampling parameter\n")[1].split("\n## ")[0]
    return {path for path in re.findall(r"`([a-z_/]+\.py)`", section) if not path.startswith("tests/")}


def test_the_document_names_files_that_are_there() -> None:
    assert files_of_the_document()
    assert not [path for path in files_of_the_document() if not (ROOT / path).is_file()]


@pytest.mark.parametrize("name", PLAIN)
def test_a_sampling_parameter_stands_in_the_files_of_the_document_and_in_few_of_them(name: str) -> None:
    files = {path for path, names in names_in_the_product().items() if name in names}
    assert len(files) <= MOST_FILES, sorted(files)
    assert files <= files_of_the_document()
    assert "runtime/row_record.py" in files


def test_the_row_state_declares_no_parameter_again() -> None:
    parameters = set(RowParameters.__annotations__)
    assert not parameters & set(RowState.__annotations__)
    for path, names in names_in_the_product().items():
        if path.endswith(("row_state.py", "device_rows.py", "take_plan.py", "admit.py", "kernels/triton/sampling.py")):
            assert not names & set(PLAIN), path
