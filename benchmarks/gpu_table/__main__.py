"""What a decode step costs on a GPU: `make bench-gpu`, or `python -m benchmarks.gpu_table`.

Without a part, or with the beginning of some parts' names: each of them of which the folder holds no result of this
commit, one after the other, then the tables. A run that was cut short is taken up where it ended. Figures are for the
machine that it runs on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from benchmarks.gpu_table import results
from benchmarks.gpu_table.cells import Run
from benchmarks.gpu_table.errors import BenchmarkError, ResultError
from benchmarks.gpu_table.merge import merge_folder
from benchmarks.gpu_table.parts import PARTS, run_part
from benchmarks.gpu_table.settings import read_settings
from benchmarks.gpu_table.tables import tables

# Parts of which several may be asked for at once.
_KINDS: Final = [kind for kind in dict.fromkeys(name.split("-")[0] for name in PARTS) if kind not in PARTS]

FOLDER = results.ROOT / "benchmarks" / "results" / "measured"  # of one commit; git ignores it


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 with a sentence on standard error."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    chosen.parts = _wanted(chosen.part)
    if chosen.list:
        for part in PARTS.values():
            print(f"{part.name:<22} {part.minutes} min  {part.what}{'' if part.is_wanted else ' (only if named)'}")
        return 0
    try:
        if not chosen.merge:
            if chosen.device == "cuda" and not torch.cuda.is_available():
                raise BenchmarkError("torch finds no CUDA GPU here; --device cpu tries the benchmark on a tiny model")
            _measure(chosen, results.commit(chosen.commit))
        if chosen.merge or chosen.part not in PARTS:
            print(tables(merge_folder(chosen.out)), end="")
    except (BenchmarkError, ResultError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _measure(chosen: argparse.Namespace, commit: str) -> None:
    asked = read_settings(chosen.set)
    if chosen.part in PARTS:
        run = Run(chosen.device, chosen.repeats, chosen.limit_s, commit, asked, chosen.ranks_only)
        result = run_part(PARTS[chosen.part], run)
        print(f"{results.write(result, chosen.out)}: {result.seconds:.0f} s", file=sys.stderr)
        if result.failure:
            raise BenchmarkError(f"figures of the part {chosen.part} are missing: {result.failure}")
        return
    for name in chosen.parts:
        path = results.path_of(name, chosen.out)
        if path.exists() and (known := results.read(path)).commit == commit and not known.failure:
            print(f"{name}: there is a result of this commit", file=sys.stderr)
            continue
        command = [sys.executable, "-m", "benchmarks.gpu_table", "--part", name, "--out", str(chosen.out)]
        command += [argument for one in chosen.set for argument in ("--set", one)]
        command += ["--ranks-only"] * chosen.ranks_only
        command += ["--device", chosen.device, "--repeats", str(chosen.repeats), "--limit-s", str(chosen.limit_s)]
        # A separate process: nothing that a part leaves on the GPU reaches the next part.
        if subprocess.run([*command, "--commit", commit.removesuffix(".dirty")], check=False).returncode:
            raise BenchmarkError(f"the part {name} failed: mend it, and start again to go on from there")


def _wanted(chosen: str | None) -> list[str]:
    """Names of the parts to measure, of the chosen kind or of all: default parts, or every part if none is default."""
    of_kind = [part for part in PARTS.values() if chosen is None or part.name.startswith(f"{chosen}-")]
    return [part.name for part in of_kind if part.is_wanted] or [part.name for part in of_kind]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_table", description=__doc__)
    parser.add_argument(
        "--part",
        choices=[*PARTS, *_KINDS],
        metavar="NAME",
        help="measure this part alone (see --list), or all whose names begin so: " + ", ".join(_KINDS),
    )
    parser.add_argument("--list", action="store_true", help="name the parts, and about how long each takes")
    parser.add_argument(
        "--merge", action="store_true", help="measure nothing: put the parts together, print the tables"
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results (benchmarks/results/measured)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: for trying a tiny part")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each length, of which the median counts (3)")
    parser.add_argument("--limit-s", type=float, default=390, help="no figure is begun after so many seconds (390)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine; may be repeated"
    )
    parser.add_argument("--ranks-only", action="store_true", help="parts about several GPUs: don't measure one too")
    parser.add_argument("--commit", help="what is measured, where the folder is no git checkout")
    return parser


if __name__ == "__main__":
    sys.exit(main())
