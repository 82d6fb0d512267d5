"""`python -m tests.mutants`: put every known mistake back, one at a time, and show that a test fails for each."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.mutants.tables import Mutant, read_mutants
from tests.mutants.trial import NoGitError, Outcome, fail_without, files_of_the_tree, try_mutant


def main() -> int:
    """Prints a table. 0: every mutant was caught. 1: one was not, or a test fails without any. 2: a flag can't be."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of mutants' names (all)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants on trial at a time (%(default)s)")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="what a test may take (%(default)g)")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in read_mutants() if mutant.name.startswith(tuple(arguments.names) or ("",))]
    if not mutants:
        parser.error("no mutant has such a name")
    try:
        files = files_of_the_tree()
    except NoGitError as error:
        parser.error(str(error))
    begun = time.monotonic()
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    failing, output = fail_without(tests, files, arguments.timeout_s)
    if failing:
        print(output, "these tests do not pass without a mutant, and nothing was tried:", *failing, sep="\n")
        return 1
    print(f"all {len(tests)} tests pass without a mutant ({time.monotonic() - begun:.0f} s)")
    missed = 0
    with ThreadPoolExecutor(arguments.jobs) as workers:
        trials = workers.map(lambda mutant: try_mutant(mutant, files, arguments.timeout_s), mutants)
        for mutant, outcomes in zip(mutants, trials, strict=True):
            missed += _report(mutant, outcomes)
    print(f"{len(mutants) - missed} of {len(mutants)} mutants caught ({time.monotonic() - begun:.0f} s)")
    return 1 if missed else 0


def _report(mutant: Mutant, outcomes: list[Outcome]) -> bool:
    """True if a test has not caught it."""
    for outcome in outcomes:
        caught = f"{outcome.verdict}, {outcome.error}" if outcome.error else outcome.verdict
        print(f"{mutant.name:34} {caught:24} {outcome.seconds:5.1f} s  {outcome.test}", flush=True)
        if not outcome.is_caught:
            print("    " + outcome.output.strip().replace("\n", "\n    "))
    return not all(outcome.is_caught for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
