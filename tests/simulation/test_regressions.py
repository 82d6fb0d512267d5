"""Scripts that went wrong once, made small: `make sim` writes them, and they stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.compare import check_script
from tests.simulation.script import read_script

SCRIPTS = sorted((Path(__file__).parent / "regressions").glob("*.json"))


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_what_went_wrong_once_goes_well(path: Path) -> None:
    assert check_script(read_script(path))
