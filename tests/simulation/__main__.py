"""python -m tests.simulation --seeds 500 --first 0: runs the seeds, prints how often each event happened.

A seed that goes wrong is printed with the command that runs it again, made smaller, and written down as a script that
the tests run from then on, once it lies in tests/simulation/regressions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tests.simulation.compare import check_script
from tests.simulation.generate import make_script
from tests.simulation.life import Broken
from tests.simulation.script import Mode
from tests.simulation.seeds import Ran, run_seed
from tests.simulation.shrink import shrink
from tests.simulation.witness import WANTED, as_lines

REGRESSIONS = Path(__file__).parent / "regressions"
_ENOUGH_TO_SEE_ALL = 200  # seeds


def main() -> int:
    """Returns the exit code: 1 if a seed went wrong, or if something never happened."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=500, help="how many (500)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--mode", type=Mode, choices=list(Mode), help="the model; the seed says which unless given")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--out", type=Path, default=REGRESSIONS, help="where scripts of failing seeds are written")
    args = parser.parse_args()
    begun = time.monotonic()
    seeds = range(args.first, args.first + args.seeds)
    failed, counts, longest = [], Counter[str](), 0
    for ran in _run(seeds, args.mode, args.jobs):
        counts += ran.counts
        longest = max(longest, ran.longest_stall)
        if ran.failure:
            print(ran.failure, flush=True)
            failed.append(ran.seed)
    print("\n".join(as_lines(counts)))
    print(f"{longest:>10,}  turns without progress, at most")
    print(f"{len(seeds)} seeds from {args.first}: {len(failed)} went wrong ({time.monotonic() - begun:.0f} s)")
    for seed in failed[:3]:
        _keep(seed, args.mode, args.out)
    missing = [what for what in sorted(WANTED) if not counts[what]]
    if len(seeds) < _ENOUGH_TO_SEE_ALL or args.mode or failed or not missing:
        return int(bool(failed))
    print(f"never happened: {', '.join(missing)}")
    return 1


def _run(seeds: range, mode: Mode | None, jobs: int) -> Iterable[Ran]:
    one = partial(run_seed, mode=mode)
    if jobs == 1 or len(seeds) == 1:
        yield from map(one, seeds)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(one, seeds, chunksize=5)


def _keep(seed: int, mode: Mode | None, folder: Path) -> None:
    """Run a failing seed again, make it smaller and write it down."""
    chosen = f" --mode {mode}" if mode else ""
    print(f"\nagain: python -m tests.simulation --seeds 1 --first {seed}{chosen}", flush=True)
    try:
        check_script(make_script(seed, mode))
    except Broken as broken:
        small = shrink(broken)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{small.script.world.mode}-{seed}.json"
        small.script.write(path)
        print(f"{len(small.script.asks)} requests and {len(small.script.events)} events are left: {path}")
        print(f"    {small}")
    else:
        print("the second time it went well: something in it does not come from the seed")


if __name__ == "__main__":
    sys.exit(main())
