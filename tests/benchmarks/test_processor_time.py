"""Processor time of a thread, as Linux says it, and as a kernel does that counts it in ticks alone."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import processor_time
from benchmarks.processor_time import DEVICE, FRONT_END, LOOP, MASKS, seconds_by_part
from runahead.runtime.masks.mask_worker import WORKER_MODULE
from runahead.service.processes.engine_process import ENGINE_MODULE
from runahead.service.processes.front_end_process import FRONT_END_MODULE

# Of a thread whose name is no single word; 250 ticks of the user's code and 50 of the kernel's.
STAT = "7 (a (b) c) S 1 7 5 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 3 0 100 1 1"


def thread(process: Path, number: int, nanoseconds: int | None) -> None:
    folder = process / "task" / str(number)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(STAT)
    if nanoseconds is not None:
        (folder / "schedstat").write_text(f"{nanoseconds} 0 1\n")


@pytest.mark.parametrize("nanoseconds", [2_500_000_000, None], ids=["ns", "ticks"])
def test_threads_of_a_session_are_counted_by_what_their_process_is(
    nanoseconds: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = (ENGINE_MODULE, WORKER_MODULE, FRONT_END_MODULE, "another")
    for number, module in enumerate(modules, start=10):
        process = tmp_path / str(number)
        for offset in range(2):
            thread(process, number + 100 * offset, nanoseconds)
        (process / "cmdline").write_bytes(f"python\0-m\0{module}\0".encode())
    monkeypatch.setattr(processor_time, "_processes", lambda session: sorted(tmp_path.iterdir()))
    service = SimpleNamespace(process=SimpleNamespace(pid=5))
    each = 300 / os.sysconf("SC_CLK_TCK") if nanoseconds is None else 2.5
    assert seconds_by_part(service) == {LOOP: each, DEVICE: each, MASKS: 2 * each, FRONT_END: 2 * each}  # type: ignore[arg-type]
