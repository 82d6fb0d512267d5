"""A sampling parameter is declared in one place, and adding one touches the few files that a document names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from runahead.runtime import row_record
from runahead.runtime.kernels.row_state import RowState
from runahead.runtime.row_record import RowParameters
from tests.project.repository import PACKAGES, ROOT, name_of, parsed, sources

MOST_FILES: Final = 8
# Those that nothing but the sampler looks at.
PLAIN: Final = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")


@cache
def names_in(path: Path) -> frozenset[str]:
    """Identifiers of a file, and its strings."""
    words = (
        getattr(node, attribute, None)
        for node in ast.walk(parsed(path))
        for attribute in ("id", "attr", "arg", "value")
    )
    return frozenset(word for word in words if isinstance(word, str))


def files_of_the_document() -> set[str]:
    """What docs/architecture.md says that a new sampling parameter touches."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## To add a sampling parameter\n")[1].split("\n## ")[0]
    steps = [line for line in section.splitlines() if re.match(r"\d\. |   ", line)]
    return set(re.findall(r"`([a-z_/]+\.py)`", "\n".join(steps)))


def test_the_document_names_files_that_are_there() -> None:
    assert files_of_the_document()
    assert not [path for path in files_of_the_document() if not (ROOT / path).is_file()]


@pytest.mark.parametrize("name", PLAIN)
def test_a_sampling_parameter_stands_in_the_files_of_the_document_and_in_few_of_them(name: str) -> None:
    files = {name_of(path) for path in sources(*PACKAGES) if name in names_in(path)}
    assert len(files) <= MOST_FILES, sorted(files)
    assert files <= files_of_the_document()
    assert name_of(Path(row_record.__file__)) in files


def test_the_row_state_declares_no_parameter_again() -> None:
    assert not set(RowParameters.__annotations__) & set(RowState.__annotations__)
