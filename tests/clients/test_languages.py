"""The count of languages, and what a language that is skipped means."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.languages import Languages
from tests.project.repository import ROOT

TEST = "tests/clients/test_examples.py::test_an_example_streams_aborts_and_reads_a_refusal[cpp]"


def test_the_line_counts_languages_and_says_why_one_was_skipped() -> None:
    languages = Languages(run={"python", "node"}, skipped={"go": "there is no command go"})
    assert languages.line() == "clients: 2 languages run (node, python), 1 skipped (go: there is no command go)"


def without_a_compiler(empty: Path, ci: str) -> subprocess.CompletedProcess[str]:
    """A run of the test of an example in C++, on a machine that has no command at all."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment | {"PATH": str(empty), "CI": ci},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(("ci", "code", "outcome"), [("true", 1, "1 error"), ("", 0, "1 skipped")])
def test_a_missing_compiler_is_a_failure_in_ci_and_a_skip_elsewhere(
    tmp_path: Path, ci: str, code: int, outcome: str
) -> None:
    done = without_a_compiler(tmp_path, ci)
    assert done.returncode == code, done.stdout + done.stderr
    assert outcome in done.stdout
    last = done.stdout.rstrip().splitlines()[-1]
    assert last.startswith("clients: 0 languages run (none), 1 skipped (cpp: there is no command c++")
