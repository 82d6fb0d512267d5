"""The stages of a run of continuous integration: `.ci/stages.sh`, which `.ci/run` sources."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.project.repository import ROOT

PATIENCE_S: Final = 30.0
# What a stage may do while a test looks: say that it has begun, and stay until it is ended.
STAYS: Final = "echo begun >began; exec sleep 120"  # which outlives the test by little, if nothing ends it


def script(*lines: str) -> list[str]:
    return ["bash", "-c", "\n".join(["set -uo pipefail", f"source {ROOT}/.ci/stages.sh", *lines])]


@contextmanager
def run(folder: Path, *lines: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The script in a folder of its own, and the reading end of a pipe that ends when nothing of it runs any more."""
    (folder / "temporary").mkdir()
    variables = {**os.environ, "TMPDIR": str(folder / "temporary")}
    reading, writing = os.pipe()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(script(*lines), cwd=folder, env=variables, pass_fds=[writing], stdout=output)
    os.close(writing)
    try:
        yield process, reading
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        os.close(reading)


def result(folder: Path, *lines: str) -> tuple[int, str]:
    """Exit status and output."""
    with run(folder, *lines) as (process, _):
        code = process.wait(PATIENCE_S)
    assert not list((folder / "temporary").iterdir()), "it has left files"
    return code, (folder / "output").read_text()


@pytest.mark.parametrize("place", ["stage", "beside"])
def test_a_stage_that_fails_fails_the_run_with_its_name(tmp_path: Path, place: str) -> None:
    code, output = result(
        tmp_path, "stage good true", f"{place} broken sh -c 'exit 3'", "together", "stage fine true", "report"
    )
    assert code == 1
    assert "\nfailed: broken (" in output
    assert "== broken: exit 3 after " in output
    assert "all stages passed" not in output


def test_a_run_whose_stages_all_pass_says_how_long_each_took(tmp_path: Path) -> None:
    code, output = result(tmp_path, "beside long true", "stage one true", "together", "stage two true", "report")
    assert code == 0
    times = output.partition("== the stages\n")[2].splitlines()
    assert sorted(line.split()[0] for line in times[:3]) == ["long", "one", "two"]
    assert "all stages passed (" in times[-1]


def test_what_runs_beside_is_shown_in_one_piece(tmp_path: Path) -> None:
    for name in ("to-beside", "to-stage"):
        os.mkfifo(tmp_path / name)
    code, output = result(
        tmp_path,
        "beside other sh -c 'echo other 1; read line <to-beside; echo other 2; echo >to-stage'",
        "stage own sh -c 'echo own 1; echo >to-beside; read line <to-stage; echo own 2'",
        "together",
    )
    assert code == 0
    assert "own 1\nown 2\n" in output
    assert output.count("other 2") == 2, "once in its command, once in what it printed"
    assert "other 1\nother 2\n== other: exit 0 after " in output


def test_together_waits_for_all_and_fails_if_one_failed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    code, output = result(
        tmp_path,
        "beside last sh -c 'read line <go; echo last has ended'",
        "beside broken sh -c 'echo >go; exit 1'",
        "together || echo one has failed",
    )
    assert code == 0, "the run goes on, and only its report fails"
    assert output.index("last has ended") < output.index("one has failed")


def test_a_stage_beside_others_begins_once_few_enough_run(tmp_path: Path) -> None:
    """With two at once the third runs while the first does, and not before the second has ended."""
    os.mkfifo(tmp_path / "go")
    lines = [
        "stages_at_once=2",
        "beside long sh -c 'echo long begins >>order; read line <go; echo long ends >>order'",
        "beside short sh -c 'echo short >>order; exit 3'",
        "beside next sh -c 'echo next >>order; echo >go'",
        "together || echo one has failed",
        "together && echo none since",
    ]
    code, output = result(tmp_path, *lines)
    assert code == 0
    order = (tmp_path / "order").read_text().splitlines()
    assert sorted(order[:2]) == ["long begins", "short"] and order[2:] == ["next", "long ends"]
    assert output.index("== short: exit 3 after") < output.index("== next: sh") < output.index("== long: exit 0 after")
    assert output.endswith("one has failed\nnone since\n")


def test_the_output_of_stages_names_the_slowest_tests(tmp_path: Path) -> None:
    _, output = result(
        tmp_path,
        "beside other echo '3.00s call tests/b.py::test_b'",
        "stage own echo '20.00s setup tests/a.py::test_a'",
        "together",
        "report",
    )
    slowest = output.partition("== the slowest tests\n")[2].splitlines()
    assert [line.split()[0] for line in slowest[:2]] == ["20.00s", "3.00s"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("ignored", ["", "trap '' INT; "], ids=["heeds", "ignores SIGINT"])
def test_a_signal_ends_every_stage_and_all_that_it_has_started(
    tmp_path: Path, number: signal.Signals, ignored: str
) -> None:
    os.mkfifo(tmp_path / "began")
    inner = f"{ignored}{STAYS}"
    lines = [
        "stages_patience=2",
        f'beside other sh -c "sh -c \\"{inner}\\"; true"',
        f'stage own sh -c "sh -c \\"{inner}\\"; true"',
    ]
    with run(tmp_path, *lines, "stage never touch never", "report") as (process, reading):
        with os.fdopen(os.open(tmp_path / "began", os.O_RDWR)) as began:  # does not end with the first that writes
            begun = [began.readline(), began.readline()]
        assert begun == ["begun\n"] * 2
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 128 + number
        ended, _, _ = select.select([reading], [], [], PATIENCE_S)
        assert ended and os.read(reading, 1) == b"", "something that a stage has started still runs"
    assert not (tmp_path / "never").exists()
    assert not list((tmp_path / "temporary").iterdir())


# Targets of `.ci/run` that run tests, each of which is in one of them.
TARGETS: Final = (
    "lint",
    "matrix",
    "service",
    "rest",
    "models",
    "interpreted",
    "coverage",
    "computed",
    "manifests",
    "clients",
)


def commands_of(target: str) -> str:
    """What make would run."""
    command = ["make", "--dry-run", target, "REPORTS=reports"]
    variables = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def words_of(target: str) -> list[str]:
    """The arguments of the target's pytest."""
    lines = commands_of(target).replace("\\\n", " ").splitlines()
    return [word for line in lines if "pytest" in line.split() for word in line.split()]


def files_of(target: str) -> set[Path]:
    """The files that the target's pytest is given as a whole."""
    words = words_of(target)
    given = {ROOT / word for word in words if word.startswith("tests/")}
    left_out = {ROOT / word.partition("=")[2] for word in words if word.startswith("--ignore=")}
    files = {file for path in given for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    return {file for file in files if not left_out & {file, *file.parents}}


def test_each_test_runs_in_one_stage() -> None:
    stages = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert [target for target in TARGETS if target not in stages and target != "lint"] == []
    times = Counter(file for target in TARGETS for file in files_of(target))
    assert {file for file, count in times.items() if count > 1} == set()
    assert set((ROOT / "tests").rglob("test_*.py")) - times.keys() == set()


def test_a_test_that_another_stage_takes_from_its_file_is_deselected_there() -> None:
    words = {target: words_of(target) for target in TARGETS}
    taken = {word for given in words.values() for word in given if word.startswith("tests/") and "::" in word}
    left_out = {word.partition("=")[2] for given in words.values() for word in given if word.startswith("--deselect=")}
    assert taken == left_out
    for file, _, name in (test.partition("::") for test in taken):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("target", [*TARGETS[1:], "test"])
def test_a_run_of_tests_leaves_its_seconds_as_xml(target: str) -> None:
    assert f"--junitxml=reports/{target}.xml" in commands_of(target)


def test_the_seconds_of_all_stages_are_summed_by_file(tmp_path: Path) -> None:
    for stage, tests in (("rest", [("a", 1.0), ("b", 2.5), ("a", 3.0)]), ("models", [("c", 9.0)])):
        cases = "".join(f'<testcase classname="tests.test_{file}" name="t" time="{time}"/>' for file, time in tests)
        (tmp_path / f"{stage}.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    command = [sys.executable, str(ROOT / ".ci" / "seconds.py"), str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert [line.split() for line in printed.splitlines()] == [
        ["9.0", "s", "1", "tests", "models:", "tests/test_c"],
        ["4.0", "s", "2", "tests", "rest:", "tests/test_a"],
        ["2.5", "s", "1", "tests", "rest:", "tests/test_b"],
    ]
