"""What the package asks of its environment is pinned; rules about its sources are in tests/project."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.project.repository import ROOT

PROJECTS = ("pyproject.toml", "clients/python/pyproject.toml")


@pytest.mark.parametrize("path", PROJECTS)
def test_the_pins_of_the_build_are_those_of_the_constraints(path: str) -> None:
    project = tomllib.loads((ROOT / path).read_text(encoding="utf-8"))
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for requirement in project["build-system"]["requires"]:
        assert requirement in constraints


@pytest.mark.parametrize("path", PROJECTS)
def test_every_dependency_is_pinned_by_the_constraints(path: str) -> None:
    project = tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"]
    pinned = {
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    assert {re.split(r"[<>=\[]", requirement)[0] for requirement in wanted} <= pinned
