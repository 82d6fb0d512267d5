"""Draws the chain as it ran: some launches of a steady decode, `serial` above and `run_ahead=2` below.

python -m benchmarks.chain_picture docs/chain.svg [--device cuda]

The engine, the device and the model are the real ones. What is drawn is what `runahead trace` shows of a service.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

import runahead.runtime.models
from runahead.runtime.engine.loop import Engine
from runahead.runtime.process.assemble import assemble
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import DeviceName, EngineConfig
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.runtime.wire.preparation import prepared_submit
from runahead.service.commands.chain_picture import picture
from runahead.service.commands.timeline import Timeline, timeline_of
from runahead.service.commands.trace_command import figures
from runahead.service.stats.trace import as_response

BUNDLED: Final = Path(runahead.runtime.models.__path__[0]) / "bundled"
ROWS: Final = 8
_DRAWN: Final = 140  # launches of the run's end
_RUN: Final = 200  # launches of the whole run


class SilentFrontEnd:
    """One front end that asks for completions and reads none."""

    def __init__(self) -> None:
        self._asked: list[tuple[int, m.ToEngine | None]] = []

    def submit(self, handle: int, block_size: int) -> None:
        """A short prompt, and more tokens than the run has launches."""
        message = prepared_submit(
            handle,
            f"r{handle}",
            np.arange(1, 9, dtype=np.int32),
            SamplingParams(),
            StoppingParams(max_tokens=2 * _RUN, ignore_eos=True),
            block_size=block_size,
        )
        self._asked.append((1, message))

    def receive(self) -> Iterator[tuple[int, m.ToEngine | None]]:
        while self._asked:
            yield self._asked.pop(0)

    @property
    def has_more(self) -> bool:
        return bool(self._asked)

    def send(self, owner: int, message: m.ToFrontEnd) -> None:
        pass

    def beat(self, now: float) -> None:
        pass

    def wake_fds(self) -> Sequence[int]:
        return ()

    def wait(self, timeout_s: float) -> None:
        pass


def record(run_ahead: int, device: DeviceName) -> Timeline:
    """A steady decode of ROWS rows, its last launches."""
    parts = assemble(EngineConfig(model=str(BUNDLED), device=device, run_ahead=run_ahead), lambda done, total: None)
    front_end = SilentFrontEnd()
    engine = Engine(parts.device, parts.scheduler, front_end, max_queue=ROWS)
    for handle in range(1, ROWS + 1):
        front_end.submit(handle, parts.info.block_size)
    while engine.ledger.retired < _RUN:
        engine.turn()
    parts.device.close()
    return timeline_of(as_response(engine.recorder.trace(_DRAWN), shares_clock=device == "cpu"))


def main() -> None:
    """Run, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the SVG file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    chosen = parser.parse_args()
    machine = torch.cuda.get_device_name() if chosen.device == "cuda" else f"{platform.machine()} CPU"
    panels = [(f"run_ahead={depth}" if depth else "serial", record(depth, chosen.device)) for depth in (0, 2)]
    for name, timeline in panels:
        print("\n".join([name, *figures(timeline)]))
    caption = f"{machine}, the bundled model, {ROWS} rows. Figures above a tick: the launch enqueued there."
    chosen.out.write_text(picture(panels, caption), encoding="utf-8")


if __name__ == "__main__":
    main()
