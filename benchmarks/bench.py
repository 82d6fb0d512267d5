"""What `make bench` runs: speed beside `transformers`, how long a start takes, time to first token at every depth, the
engine's host time, and what one request costs the others.

Figures are for this machine, at this moment; compare within one run, never across two.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import runahead.runtime.models
from benchmarks import (
    attacks,
    depths,
    drafts,
    first_token,
    front_ends,
    host_time,
    host_time_beside,
    prefix_hit,
    pressure,
    start,
    structure,
    throughput,
)
from benchmarks.gpu_table.shapes import SHAPES

PARTS = (
    "throughput",
    "depths",
    "drafts",
    "structure",
    "start",
    "first-token",
    "prefix-hit",
    "host-time",
    "front-ends",
    "attacks",
    "pressure",
)
BUNDLED = Path(runahead.runtime.models.__path__[0]) / "bundled"


def main() -> None:
    """Print the tables that were asked for, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="tables to print")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="checkpoint folder (the bundled model)")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="of depths, drafts, structure and start"
    )
    parser.add_argument("--beside", type=Path, help="host-time, front-ends: another checkout, measured alternately")
    parser.add_argument("--flags", default="", help="drafts, structure, start: of the service, in one string")
    shapes = [name for name in SHAPES if not name.startswith("tiny")]  # those have fewer tokens than the tokenizer
    parser.add_argument(
        "--shape", choices=shapes, default="", help="drafts, structure, start: random weights, no model"
    )
    chosen = parser.parse_args()
    parts = chosen.parts or PARTS
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {chosen.model.name}\n")
    if "throughput" in parts:
        print("Tokens a second on the CPU")
        throughput.main(chosen.model)
    if "depths" in parts:
        print(f"\nTokens a second at each depth, device {chosen.device}")
        depths.main(chosen.model, chosen.device)
    if "drafts" in parts:
        said = f"\nTokens a second of code completion, device {chosen.device}, without drafts and with those of each"
        print(f"{said} drafter")
        drafts.main(chosen.model, chosen.device, chosen.flags.split(), chosen.shape)
    if "structure" in parts:
        print(f"\nStructured output, device {chosen.device}: gaps between tokens of plain rows beside JSON rows, in ms")
        structure.main(chosen.model, chosen.device, chosen.flags.split(), chosen.shape)
    if "start" in parts:
        print(f"\nSeconds until the service is ready, device {chosen.device}")
        start.main(chosen.model, chosen.device, chosen.flags.split(), chosen.shape)
    if "first-token" in parts:
        print(f"\nTime to first token while {first_token.BACKGROUND} other streams run")
        first_token.main(chosen.model)
    if "prefix-hit" in parts:
        print("\nTime to first token of a prompt that is cached already")
        prefix_hit.main(chosen.model)
    if "host-time" in parts:
        print("\nThe engine's host time a launch on the null device, plan to publish")
        if chosen.beside is None:
            host_time.main()
        else:
            host_time_beside.main(chosen.beside, tuple(host_time.GOALS_US))
    if "front-ends" in parts:
        print("\nWhat front ends carry, behind an engine that computes nothing")
        front_ends.main(chosen.beside)
    if "attacks" in parts:
        print("\nTime to first token of a bystander while the port is attacked")
        attacks.main(chosen.model)
    if "pressure" in parts:
        print("\nA turn of the engine's loop on the null device, quiet and under pressure")
        pressure.main([])


if __name__ == "__main__":
    main()
