"""The mutants: patches beside this file, each of which puts one known mistake back into the code.

A patch begins with comment lines, which `git apply` skips:

    # mistake 7: what is wrong, in a sentence        a number of docs/decisions/0006-mutants.md
    # test: tests/runtime/scheduler/test_ledger.py::test_name   as often as there are tests, each of which must fail
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parent
ROOT: Final = FOLDER.parents[1]

_MISTAKE: Final = re.compile(r"# mistake (\d+): (.+)")
_TEST: Final = re.compile(r"# test: (\S+::\S.*)")


class PatchHeaderError(ValueError):
    """The comment lines of a patch do not say what it is."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A patch and the tests that must fail with it. number: of the mistake. sentence: what is wrong."""

    patch: Path
    number: int
    sentence: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.patch.stem


def read_mutant(patch: Path) -> Mutant:
    """The mutant that a patch's comment lines describe. Raises PatchHeaderError."""
    lines = patch.read_text(encoding="utf-8").splitlines()
    begin = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    mistakes = [found for line in lines[:begin] if (found := _MISTAKE.fullmatch(line))]
    tests = [found for line in lines[:begin] if (found := _TEST.fullmatch(line))]
    if len(mistakes) != 1 or not tests or len(mistakes) + len(tests) != begin:
        raise PatchHeaderError(
            f"{patch.name} must begin with one line '# mistake NUMBER: SENTENCE' and lines '# test: NODE ID'"
        )
    return Mutant(patch, int(mistakes[0][1]), mistakes[0][2], tuple(found[1] for found in tests))


def patches() -> list[Path]:
    """All of them, by name."""
    return sorted(FOLDER.glob("*.patch"))
