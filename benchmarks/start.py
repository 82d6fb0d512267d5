"""How long the service takes to be ready, and when it said what until then.

On a GPU a service starts twice without a drafter, then twice with one, and all four share a folder of compiled kernels,
which is empty before the first. A shape in a model's place has random weights: how fast a disk reads is left out.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.chain_figures import flags_of
from benchmarks.gpu_table.shapes import random_weights
from benchmarks.local_service import started_service

DRAFTERS: Final = ("none", "ngram")
KERNELS: Final = {"cpu": ("none",), "cuda": ("to compile", "compiled")}
LIMIT_S: Final = 400.0


def main(folder: Path, device: str = "cpu", more: Sequence[str] = (), shape: str = "") -> None:
    """Print the table. more: flags of all services. shape: in the place of the model that is in the folder."""
    print(f"{'drafter':<10}{'kernels':<12}{'ready':>7}    seconds from the call until each line of the log")
    with contextlib.ExitStack() as stack:
        if shape:
            folder, more = stack.enter_context(random_weights(shape)), ["--load-format", "dummy", *more]
        flags = ["--model", str(folder), *flags_of(device), *more]
        if device == "cuda":
            flags += ["--kernel-cache", stack.enter_context(tempfile.TemporaryDirectory(prefix="runahead-"))]
        for drafter in DRAFTERS:
            for kernels in KERNELS[device]:
                ready, said = _start([*flags, "--drafter", drafter])
                print(f"{drafter:<10}{kernels:<12}{ready:>7.1f}    {said}", flush=True)


def _start(flags: Sequence[str]) -> tuple[float, str]:
    """Seconds until it serves, and those until each line that its log had by then."""
    begun = time.time()
    with started_service(flags, LIMIT_S) as service:
        lines = service.log.read_text(encoding="utf-8").splitlines()
    said = [json.loads(line) for line in lines if line.startswith("{")]
    after = {line["event"]: _seconds(line, begun) for line in said}  # of several lines of an event the last
    return after["serving"], ", ".join(f"{event} {seconds:.1f}" for event, seconds in after.items())


def _seconds(line: Mapping[str, Any], begun: float) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp() - begun
