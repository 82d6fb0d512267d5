"""A start of the bundled model, timed: a line for each drafter, with what the service had said until it served."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import start
from runahead.runtime import models

BUNDLED = Path(models.__path__[0]) / "bundled"


def test_each_start_is_timed_until_it_serves_and_so_is_what_it_said_before(capsys: pytest.CaptureFixture[str]) -> None:
    start.main(BUNDLED, more=["--max-rows", "2"])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("drafter")
    assert [line.split()[:2] for line in lines] == [["none", "none"], ["ngram", "none"]]
    for line in lines:
        ready, said = float(line.split()[2]), dict(re.findall(r"(\w+) ([\d.]+)(?:,|$)", line))
        assert 0 < float(said["sizes"]) <= float(said["engine_ready"]) <= float(said["serving"]) == ready
