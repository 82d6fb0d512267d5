"""What `make bench` runs: speed beside `transformers`, how long a start takes, time to first token at every depth, what
drafts bring, and the engine's host time.

Figures are for this machine, at this moment; compare within one run, never across two.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import runahead.runtime.models
from benchmarks import drafts, host_time, host_time_beside, serving, start
from benchmarks.gpu_table.shapes import SHAPES

PARTS = ("throughput", "depths", "drafts", "start", "first-token", "prefix-hit", "host-time")
BUNDLED = Path(runahead.runtime.models.__path__[0]) / "bundled"


def main() -> None:
    """Print the tables that were asked for, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="tables to print")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="checkpoint folder (the bundled model)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of depths, drafts and start")
    parser.add_argument("--beside", type=Path, help="host-time: another checkout, measured alternately")
    parser.add_argument("--flags", default="", help="drafts, start: of the service, in one string")
    shapes = [name for name in SHAPES if not name.startswith("tiny")]  # those have fewer tokens than the tokenizer
    parser.add_argument("--shape", choices=shapes, default="", help="drafts, start: random weights, no model")
    chosen = parser.parse_args()
    model, device, flags = chosen.model, chosen.device, chosen.flags.split()
    tables = {
        "throughput": ("Tokens a second on the CPU", lambda: serving.throughput(model)),
        "depths": (f"Tokens a second at each depth, device {device}", lambda: serving.depths(model, device)),
        "drafts": (
            f"Tokens a second of code completion, device {device}, without drafts and with those of each drafter",
            lambda: drafts.main(model, device, flags, chosen.shape),
        ),
        "start": (
            f"Seconds until the service is ready, device {device}",
            lambda: start.main(model, device, flags, chosen.shape),
        ),
        "first-token": (
            f"Time to first token while {serving.BACKGROUND} other streams run",
            lambda: serving.first_token(model),
        ),
        "prefix-hit": ("Time to first token of a prompt that is cached already", lambda: serving.prefix_hit(model)),
        "host-time": (
            "The engine's host time a launch on the null device, plan to publish",
            lambda: _host_time(chosen.beside),
        ),
    }
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {model.name}")
    for name in chosen.parts or PARTS:
        title, table = tables[name]
        print(f"\n{title}", flush=True)
        table()


def _host_time(beside: Path | None) -> None:
    if beside is None:
        host_time.main()
    else:
        host_time_beside.main(beside, tuple(host_time.GOALS_US))


if __name__ == "__main__":
    main()
