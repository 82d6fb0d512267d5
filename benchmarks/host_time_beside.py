"""The engine's host time in this checkout and in another, measured alternately: what a change has done to it.

Every measurement is a process of its own, started in the checkout whose engine it runs, and runs that checkout's own
`benchmarks.host_time`. A round measures both, the one that goes first changing from round to round, so that whatever
else the machine does falls on both alike. The count of calls is the same in every run.
"""

from __future__ import annotations

import inspect
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROUNDS = 5
HERE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Calls:
    """Python and C functions called in one turn. quiet: the median turn. mean: borders and logging included."""

    python_quiet: float
    c_quiet: float
    python_mean: float
    c_mean: float


def main(other: Path, rows: tuple[int, ...], lifecycle: bool = True) -> None:
    """Print both engines' times and calls for each number of rows."""
    print(f"before: {other.resolve()}; after: {HERE}; medians of {ROUNDS} alternating rounds")
    print(
        f"{'rows':>5} {'before, µs':>12} {'after, µs':>12} {'ratio':>7} {'mean, ratio':>12}"
        "   Python + C calls, quiet (mean)"
    )
    for count in rows:
        times: dict[Path, list[Any]] = {other: [], HERE: []}
        for round_ in range(ROUNDS):
            for checkout in (other, HERE) if round_ % 2 == 0 else (HERE, other):
                times[checkout].append(_measured(checkout, "time", count, lifecycle))
        median, mean = (
            [statistics.median(run[of] for run in times[path]) for path in (other, HERE)]
            for of in ("median_us", "mean_us")
        )
        before, after = (Calls(**_measured(path, "calls", count, lifecycle)) for path in (other, HERE))
        print(
            f"{count:>5} {median[0]:>12.0f} {median[1]:>12.0f} {median[1] / median[0]:>7.2f} {mean[1] / mean[0]:>12.2f}"
            f"   {_calls(before)} -> {_calls(after)}"
        )


def _calls(calls: Calls) -> str:
    return f"{calls.python_quiet:.0f} + {calls.c_quiet:.0f} ({calls.python_mean:.0f} + {calls.c_mean:.0f})"


def _measured(checkout: Path, what: str, rows: int, lifecycle: bool) -> dict[str, float]:
    """What a process that runs the engine of `checkout` has measured."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), what, str(rows), str(int(lifecycle))]
    # The code of that checkout, whichever one is installed. One from before there was `src` has it at its root.
    path = f"{checkout.resolve() / 'src'}{os.pathsep}{checkout.resolve()}"
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{checkout} could not be measured; what its process said is above")
    found: dict[str, float] = json.loads(run.stdout)
    return found


# ---------------------------------------------------------------- in the process of one checkout


def count_calls(turn: Callable[[], object]) -> tuple[int, int]:
    """Python and C functions that `turn` calls."""
    seen: Counter[str] = Counter()

    def note(frame: FrameType, event: str, function: object) -> None:
        seen[event] += 1

    sys.setprofile(note)
    try:
        turn()
    finally:
        sys.setprofile(None)
    return seen["call"] - 1, seen["c_call"] - 1  # without the call of `turn` itself, and the one that ends the count


def _count(rows: int, lifecycle: bool) -> Calls:
    """Calls of the turns that the checkout's own benchmark takes: of the last ones, in which every row decodes."""
    from benchmarks import host_time

    engine_class = _engine_class()
    counts: list[tuple[int, int]] = []
    turn = engine_class.turn

    def counted(engine: Any) -> None:
        counts.append(count_calls(lambda: turn(engine)))

    engine_class.turn = counted
    host_time.measure(rows, lifecycle)
    python, c = zip(*counts[-host_time.LAUNCHES :], strict=True)
    return Calls(statistics.median(python), statistics.median(c), statistics.fmean(python), statistics.fmean(c))


def _engine_class() -> Any:
    """The class of the engine that this checkout's own benchmark runs, by whatever name it imports it.

    Ends the process with a sentence where there is none, or where it is not this checkout's.
    """
    try:
        from benchmarks import host_time
    except ImportError as error:
        sys.exit(f"{error}: what the modules of {Path.cwd()} are found by is made by `make setup`, run there")
    if (found := vars(host_time).get("Engine")) is None:
        sys.exit(f"{host_time.__file__} imports no Engine: this checkout is laid out otherwise than is known here")
    measured = Path(inspect.getfile(found)).resolve()
    if not measured.is_relative_to(Path.cwd().resolve()):
        sys.exit(f"the engine is from {measured}, not from {Path.cwd()}: run `make setup` there first")
    return found


def _child(what: str, rows: int, lifecycle: bool) -> None:
    _engine_class()
    from benchmarks import host_time

    found = _count(rows, lifecycle) if what == "calls" else host_time.measure(rows, lifecycle)
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]), bool(int(sys.argv[3])))
