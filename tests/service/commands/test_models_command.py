"""`runahead models` prints a line for each architecture that is served."""

from __future__ import annotations

import pytest

from runahead.runtime.models.registry import ARCHITECTURES
from runahead.service import cli


def test_each_architecture_has_a_line_with_models_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [[one.name, one.models] for one in ARCHITECTURES.values()]
