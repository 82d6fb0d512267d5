"""What `make bench` runs: speed beside `transformers`, time to first token at every depth, the engine's host time.

Figures are for this machine, at this moment; compare within one run, never across two.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import runtime.models
from benchmarks import first_token, host_time, throughput

BUNDLED = Path(runtime.models.__path__[0]) / "bundled"


def main() -> None:
    """Print the tables that were asked for, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["throughput", "first-token", "host-time", []], default=[])
    parser.add_argument("--model", type=Path, default=BUNDLED, help="checkpoint folder (the bundled model)")
    chosen = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {chosen.model.name}\n")
    if not chosen.parts or "throughput" in chosen.parts:
        print("Tokens a second on the CPU")
        throughput.main(chosen.model)
    if not chosen.parts or "first-token" in chosen.parts:
        print(f"\nTime to first token while {first_token.BACKGROUND} other streams run")
        first_token.main(chosen.model)
    if not chosen.parts or "host-time" in chosen.parts:
        print("\nThe engine's host time a launch on the null device, plan to publish")
        host_time.main()


if __name__ == "__main__":
    main()
