"""One mutant on trial: a copy of the tree, the edits, the tests it names."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutants.tables import ROOT, Mutant, NoLongerAppliesError, apply
from tests.mutants.verdicts import OPTION, Verdict, read_verdicts

CAUGHT: Final = "caught"
SURVIVED: Final = "SURVIVED"
NO_LONGER_APPLIES: Final = "NO LONGER APPLIES"

# A test that ends with one of these has met a broken mutant, not the mistake.
_BROKEN: Final = {
    "AttributeError",
    "ImportError",
    "ModuleNotFoundError",
    "NameError",
    "SyntaxError",
    "UnboundLocalError",
}
_TESTS_FAILED: Final = 1  # pytest's exit code
_STARTING_S: Final = 120.0  # what importing and collecting may take beside the test itself


class NoGitError(RuntimeError):
    """The tree is no git checkout, or there is no git."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test with one mutant.

    verdict: one of the words above, or why there is none. error: type of the exception that a failed test ended with.
    """

    test: str
    verdict: str
    seconds: float
    error: str = ""
    output: str = ""

    @property
    def is_caught(self) -> bool:
        return self.verdict == CAUGHT


def git(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs git on the files in `cwd`, whatever repository is around. Raises NoGitError without git."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(cwd.resolve().parent)
    try:
        return subprocess.run(["git", *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NoGitError("git is not installed; it lists the files of the tree") from error


def files_of_the_tree() -> list[Path]:
    """Everything that is tracked or might be, and the generated stubs, relative to the root. Raises NoGitError."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    if listed.returncode:
        raise NoGitError(f"{ROOT} is no git checkout: {listed.stderr.strip()}")
    stubs = [path.relative_to(ROOT) for path in (ROOT / "protos").rglob("*_pb2*.py*") if path.suffix != ".pyc"]
    return sorted({*map(Path, filter(None, listed.stdout.split("\0"))), *stubs})


@contextmanager
def copied_tree(files: Sequence[Path]) -> Iterator[Path]:
    """A folder with a copy of these files, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder).resolve() / "tree"
        for path in files:
            source = ROOT / path
            if source.is_file() and not source.is_symlink():
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy / path)
        shutil.copytree(ROOT / "src", copy / "src", symlinks=True)  # its links lead into the copy
        yield copy


def run_test(tree: Path, tests: Sequence[str], timeout_s: float, *options: str) -> tuple[int, list[Verdict], str]:
    """Run tests on a tree. Returns pytest's exit code (-1: it hung), each phase, and the end of the output."""
    verdicts = tree.parent / "verdicts"
    verdicts.unlink(missing_ok=True)
    command = [
        *(
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "-p",
            "tests.mutants.verdicts",
        ),
        *(f"{OPTION}={verdicts}", f"--timeout={timeout_s:g}", *options, *tests),
    ]
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'src'}", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s * len(tests) + _STARTING_S)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = -1
    return code, read_verdicts(verdicts), output[-4000:]


def judge(test: str, code: int, verdicts: Sequence[Verdict]) -> tuple[str, str]:
    """The verdict: whether a test, whatever its parameters, has failed as one does that finds the mistake. And how."""
    own = [verdict for verdict in verdicts if verdict.node == test or verdict.node.startswith(f"{test}[")]
    failed = [verdict for verdict in own if verdict.outcome == "failed"]
    errors = ", ".join(sorted({verdict.error for verdict in failed}))
    if code == -1:
        return "HUNG", errors
    if any(verdict.when == "setup" or verdict.error in _BROKEN for verdict in failed):
        return "BROKEN BY ITS EDIT", errors
    if failed and code == _TESTS_FAILED:  # in its own body, or by what it has left behind
        return CAUGHT, errors
    if any(verdict.outcome == "passed" and verdict.when == "call" for verdict in own):
        return SURVIVED, errors
    return f"DID NOT RUN (pytest ended with {code})", errors


def try_mutant(mutant: Mutant, files: Sequence[Path], timeout_s: float) -> list[Outcome]:
    """Each test that the mutant names, on a copy with its edits."""
    begun = time.monotonic()
    with copied_tree(files) as tree:
        try:
            apply(mutant, tree)
        except NoLongerAppliesError as missing:
            return [
                Outcome(test, NO_LONGER_APPLIES, time.monotonic() - begun, "", str(missing)) for test in mutant.tests
            ]
        outcomes = []
        for test in mutant.tests:
            begun = time.monotonic()
            code, verdicts, output = run_test(tree, [test], timeout_s, "-x")
            verdict, error = judge(test, code, verdicts)
            outcomes.append(Outcome(test, verdict, time.monotonic() - begun, error, output))
        return outcomes


def fail_without(tests: Sequence[str], files: Sequence[Path], timeout_s: float) -> tuple[list[str], str]:
    """The same tests on a copy without any mutant: those that do not pass there, and the output's end."""
    with copied_tree(files) as tree:
        code, verdicts, output = run_test(tree, tests, timeout_s)
    return [test for test in tests if judge(test, code, verdicts)[0] != SURVIVED], output
