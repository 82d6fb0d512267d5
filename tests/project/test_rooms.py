"""Packages of kernels, models and programs hold one idea each, and say so."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

from tests.project.repository import ROOT, name_of

MOST_FILES: Final = 15  # besides __init__.py; a package with more says why
TREES: Final = ("runtime/kernels/triton", "runtime/models", "runtime/programs")
PACKAGES: Final = sorted(
    path.parent for tree in TREES for path in (ROOT / tree).rglob("__init__.py") if "__pycache__" not in path.parts
)


def files_in(package: Path) -> list[str]:
    return sorted(path.name for path in package.glob("*.py") if path.name != "__init__.py")


def says(package: Path) -> str:
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""


@pytest.mark.parametrize("package", PACKAGES, ids=name_of)
def test_a_package_says_what_it_holds_and_why_it_has_many_files(package: Path) -> None:
    assert says(package)
    assert len(files_in(package)) <= MOST_FILES or "More than 15 files" in says(package)


def test_the_kernels_themselves_are_in_packages_of_their_own() -> None:
    assert len(PACKAGES) > 15, "the folders are not where they are looked for"
    assert files_in(ROOT / "runtime/kernels/triton") == []
    assert files_in(ROOT / "runtime/programs") == []


def test_every_folder_with_python_files_is_a_package() -> None:
    folders = {path.parent for tree in TREES for path in (ROOT / tree).rglob("*.py")}
    assert folders == set(PACKAGES)


def test_the_links_are_what_the_build_installs() -> None:
    """An editor and a type checker find a module under the name that an installed package has."""
    table = dict(re.findall(r'"(runahead[.\w]*)": "([\w/]+)"', (ROOT / "setup.py").read_text(encoding="utf-8")))
    assert len(table) == 4
    for name, folder in table.items():
        linked = ROOT / "src" / name.replace(".", "/")
        files = {path.name for path in (ROOT / folder).iterdir() if path.name != "__pycache__"}
        assert {path.name for path in linked.iterdir()} >= files
        assert all((linked / file).resolve() == (ROOT / folder / file).resolve() for file in files)
