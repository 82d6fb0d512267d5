"""The engine's host time in this checkout and in another, measured alternately: what a change has done to it.

Every measurement is a separate process, started in the checkout whose engine it runs, and runs that checkout's own
`benchmarks.host_time`. A round measures both, the one that goes first changing from round to round, so that whatever
else the machine does falls on both alike.
"""

from __future__ import annotations

import inspect
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROUNDS = 5
HERE = Path(__file__).resolve().parent.parent


def main(other: Path, rows: tuple[int, ...], lifecycle: bool = True) -> None:
    """Print both engines' times for each number of rows."""
    print(f"before: {other.resolve()}; after: {HERE}; medians of {ROUNDS} alternating rounds")
    print(f"{'rows':>5} {'before, µs':>12} {'after, µs':>12} {'ratio':>7} {'mean, ratio':>12}")
    for count in rows:
        times: dict[Path, list[Any]] = {other: [], HERE: []}
        for round_ in range(ROUNDS):
            for checkout in (other, HERE) if round_ % 2 == 0 else (HERE, other):
                times[checkout].append(_measured(checkout, count, lifecycle))
        median, mean = (
            [statistics.median(run[of] for run in times[path]) for path in (other, HERE)]
            for of in ("median_us", "mean_us")
        )
        print(
            f"{count:>5} {median[0]:>12.0f} {median[1]:>12.0f} {median[1] / median[0]:>7.2f} {mean[1] / mean[0]:>12.2f}"
        )


def _measured(checkout: Path, rows: int, lifecycle: bool) -> dict[str, float]:
    """What a process that runs the engine of `checkout` has measured."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), str(rows), str(int(lifecycle))]
    # The code of that checkout, whichever one is installed. One from before there was `src` has it at its root.
    path = f"{checkout.resolve() / 'src'}{os.pathsep}{checkout.resolve()}"
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{checkout} could not be measured; what its process said is above")
    found: dict[str, float] = json.loads(run.stdout)
    return found


# ---------------------------------------------------------------- in the process of one checkout


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


if __name__ == "__main__":
    _engine_class()
    from benchmarks import host_time

    print(json.dumps(asdict(host_time.measure(int(sys.argv[1]), bool(int(sys.argv[2]))))))
