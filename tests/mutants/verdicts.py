"""A pytest plugin for the runs of mutants: what became of each test goes to a file, and the code must be the copy's."""

from __future__ import annotations

import importlib
import json
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

OPTION = "--verdicts"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One phase of one test. outcome: passed, failed or skipped. error: the exception's type, or empty."""

    node: str
    when: str
    outcome: str
    error: str


def read_verdicts(path: Path) -> list[Verdict]:
    """What a run has left; nothing if it came to no test."""
    if not path.exists():
        return []
    return [Verdict(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, required=True, metavar="FILE", help="one line of JSON for each phase of a test")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Code of another tree, one that is installed in place for instance, would make every mutant survive."""
    for name in ("runahead.cuda_graphs", "runahead.runtime", "runahead.service", "runahead.v1"):
        (place,) = importlib.import_module(name).__path__
        if not Path(place).resolve().is_relative_to(session.config.rootpath):
            raise pytest.UsageError(f"{name} was imported from {place}, outside {session.config.rootpath}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    error = call.excinfo.typename if call.excinfo else ""
    with item.config.getoption(OPTION).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(Verdict(item.nodeid, report.when, report.outcome, error))) + "\n")
    return report
