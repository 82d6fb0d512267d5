"""`runahead models` prints a line for each architecture that is served: what its layers may be, and models of it."""

from __future__ import annotations

import re

import pytest

from runahead.runtime.models.registry import ARCHITECTURES
from runahead.service import cli


def test_each_architecture_has_a_line_with_models_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    lines = capfd.readouterr().out.splitlines()
    expected = [[one.name, ", ".join(one.layers), one.models] for one in ARCHITECTURES.values()]
    assert [re.split("  +", line) for line in lines] == expected
