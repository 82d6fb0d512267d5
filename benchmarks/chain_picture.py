"""Draws the chain as it ran: some launches of a steady decode, `serial` above and `run_ahead=2` below.

python -m benchmarks.chain_picture docs/chain.svg [--device cuda]

The engine, the device and the model are the real ones. The host's side is what this process saw: when the loop was at
work, when it enqueued each launch. The device's side is the stamps that every launch leaves in the result ring. Both
clocks tick in nanoseconds but need not begin together: a launch starts after it was enqueued and has ended before the
host sees its mark, and the offset is the middle of what these two allow over the steady part of the run.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

import numpy as np
import torch
from numpy.typing import NDArray

import runahead.runtime.models
from runahead.cuda_graphs.device import Device
from runahead.cuda_graphs.shape import LaunchShape
from runahead.runtime.engine.loop import Engine
from runahead.runtime.process.assemble import assemble
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import DeviceName, EngineConfig
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.runtime.wire.preparation import prepared_submit

BUNDLED: Final = Path(runahead.runtime.models.__path__[0]) / "bundled"
ROWS: Final = 8
SHOWN: Final = 5  # launches of the slower panel
_WARM: Final = 60  # launches before those
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


class WatchedDevice:
    """Hands everything on to a device, and notes when the host waited, enqueued and saw launches ended. Times in ns."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.rings = device.rings
        self.counters = device.counters
        self.buckets = device.buckets
        self.offered: dict[int, int] = {}  # by launch: before the device was called
        self.enqueued: dict[int, int] = {}  # by launch: when it had returned
        self.seen: dict[int, int] = {}  # by launch: the first look that found it ended
        self.started: dict[int, int] = {}  # by launch, on the device's clock
        self.stopped: dict[int, int] = {}
        self.waits: list[tuple[int, int]] = []
        self._newest = 0

    def launch(self, shape: LaunchShape) -> None:
        self.offered[shape.number] = time.monotonic_ns()
        self._device.launch(shape)
        self.enqueued[shape.number] = time.monotonic_ns()

    def sampled(self) -> int:
        return self._device.sampled()

    def ended(self) -> int:
        newest, now = self._device.ended(), time.monotonic_ns()
        for number in range(self._newest + 1, newest + 1):
            slot = self.rings.slot(number)
            self.seen[number] = now
            self.started[number], self.stopped[number] = int(self.rings.start_ns[slot]), int(self.rings.end_ns[slot])
        self._newest = newest
        return newest

    def wait(self, sampled: int, ended: int, wake_fds: Sequence[int], timeout_s: float) -> None:
        begun = time.monotonic_ns()
        self._device.wait(sampled, ended, wake_fds, timeout_s)
        self.waits.append((begun, time.monotonic_ns()))

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        return self._device.read_rows()

    def close(self) -> None:
        self._device.close()


@dataclass(frozen=True, slots=True)
class Run:
    """Times in microseconds from the first launch shown. work: when the loop did not wait. idle_us: between launches.

    slack_us: by how much the device's side may be drawn too early or too late.
    """

    name: str
    work: list[tuple[float, float]]
    enqueued: dict[int, float]
    launches: dict[int, tuple[float, float]]
    idle_us: float
    step_us: float
    slack_us: float


def record(run_ahead: int, device: DeviceName) -> Run:
    """A steady decode of ROWS rows, SHOWN launches out of its middle."""
    parts = assemble(EngineConfig(model=str(BUNDLED), device=device, run_ahead=run_ahead), lambda done, total: None)
    watched, front_end = WatchedDevice(parts.device), SilentFrontEnd()
    engine = Engine(watched, parts.scheduler, front_end, max_queue=ROWS)
    for handle in range(1, ROWS + 1):
        front_end.submit(handle, parts.info.block_size)
    while engine.ledger.retired < _RUN:
        engine.turn()
    watched.close()
    steady = range(_WARM, _RUN)
    least = max(watched.offered[n] - watched.started[n] for n in steady)
    most = min(watched.seen[n] - watched.stopped[n] for n in steady)
    if least > most:
        raise RuntimeError(f"the clocks of host and device drifted apart by {(least - most) / 1e3:.1f} µs while it ran")
    offset = 0 if device == "cpu" else (least + most) // 2  # the CPU device reads the host's own clock
    return _cut(watched, offset, f"run_ahead={run_ahead}" if run_ahead else "serial", (most - least) / 2e3)


def _cut(watched: WatchedDevice, offset: int, name: str, slack_us: float) -> Run:
    """From SHOWN launches in a row on whose steps are, the worst of them, as near the median step as there are."""
    steps = np.diff([watched.started[n] for n in range(_WARM, _RUN)])
    off = np.lib.stride_tricks.sliding_window_view(np.abs(steps - np.median(steps)), SHOWN).max(axis=1)
    first = _WARM + int(np.argmin(off))
    zero = watched.started[first] + offset
    gaps = [watched.started[n + 1] - watched.stopped[n] for n in range(_WARM, _RUN - 1)]

    def shown(at: int) -> float:
        return (at + offset - zero) / 1e3

    return Run(
        name,
        work=[((before[1] - zero) / 1e3, (after[0] - zero) / 1e3) for before, after in pairwise(watched.waits)],
        enqueued={n: (at - zero) / 1e3 for n, at in watched.enqueued.items()},
        launches={n: (shown(watched.started[n]), shown(watched.stopped[n])) for n in range(first, _RUN)},
        idle_us=float(np.median(gaps)) / 1e3,
        step_us=float(np.median(steps)) / 1e3,
        slack_us=slack_us,
    )


# ---------------------------------------------------------------- the drawing

WIDTH: Final = 960
LEFT: Final = 110
_HOST, _DEVICE, _IDLE, _INK = "#4c78a8", "#59a14f", "#e15759", "#222222"


class Drawing:
    """SVG elements, one after the other."""

    def __init__(self, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            ' font-family="sans-serif" font-size="13">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        ]

    def bar(self, x: float, y: float, width: float, height: float, colour: str, title: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{colour}">'
            f"<title>{escape(title)}</title></rect>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_INK}" stroke-width="0.8"/>'
        )

    def text(self, x: float, y: float, text: str, *, colour: str = _INK, anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>')

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def draw(runs: Sequence[Run], caption: str) -> str:
    """Both runs to one scale, as SVG."""
    panel = 150
    drawing = Drawing(panel * len(runs) + 60)
    span = max(run.launches[min(run.launches) + SHOWN - 1][1] for run in runs)
    scale = (WIDTH - LEFT - 20) / span
    for place, run in enumerate(runs):
        _draw_panel(drawing, run, 20 + place * panel, span, scale)
    end = 20 + panel * len(runs)
    for tick in range(0, int(span), _tick(span)):
        drawing.line(LEFT + tick * scale, end - 12, LEFT + tick * scale, end - 6)
        drawing.text(LEFT + tick * scale, end + 8, f"{tick} µs", anchor="middle")
    drawing.text(10, end + 30, caption)
    return str(drawing)


def _tick(span: float) -> int:
    """Microseconds between the marks of the scale, 1, 2 or 5 times a power of ten: ten of them at most."""
    return next(step * 10**power for power in count(1) for step in (1, 2, 5) if span / (step * 10**power) <= 10)


def _draw_panel(drawing: Drawing, run: Run, top: float, span: float, scale: float) -> None:
    host, device, height = top + 28, top + 84, 26

    def x(at: float) -> float:
        return LEFT + at * scale

    drawing.text(
        10, top + 10, f"{run.name}: a step takes {run.step_us:.0f} µs, the device is idle for {run.idle_us:.0f} of them"
    )
    drawing.text(10, host + 18, "host at work")
    drawing.text(10, device + 18, "device")
    for begin, end in run.work:
        if end > 0 and begin < span:
            drawing.bar(
                x(max(begin, 0)), host, (min(end, span) - max(begin, 0)) * scale, height, _HOST, f"{end - begin:.0f} µs"
            )
    numbers = [number for number, (begin, _) in sorted(run.launches.items()) if begin < span]
    for number in numbers:
        begin, end = run.launches[number]
        until = min(end, span)
        drawing.bar(
            x(begin), device, (until - begin) * scale, height, _DEVICE, f"launch {number}: {end - begin:.0f} µs"
        )
        if until == end:
            drawing.text((x(begin) + x(end)) / 2, device + 18, str(number), colour="#ffffff", anchor="middle")
    for before, after in pairwise(numbers):
        idle = run.launches[before][1], run.launches[after][0]
        drawing.bar(x(idle[0]), device, (idle[1] - idle[0]) * scale, height, _IDLE, f"idle: {idle[1] - idle[0]:.1f} µs")
    for number, at in run.enqueued.items():
        if 0 <= at <= span:
            drawing.line(x(at), host - 4, x(at), host + height)
            drawing.text(x(at), host - 7, str(number), anchor="middle")
            if number in numbers:
                drawing.line(x(at), host + height, x(run.launches[number][0]), device)


def main() -> None:
    """Run, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the SVG file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    chosen = parser.parse_args()
    machine = torch.cuda.get_device_name() if chosen.device == "cuda" else f"{platform.machine()} CPU"
    runs = [record(run_ahead, chosen.device) for run_ahead in (0, 2)]
    for run in runs:
        print(f"{run.name}: step {run.step_us:.1f} µs, idle {run.idle_us:.1f} µs, clocks within {run.slack_us:.1f} µs")
    chosen.out.write_text(
        draw(runs, f"{machine}, the bundled model, {ROWS} rows. Figures above a tick: the launch enqueued there.")
    )


if __name__ == "__main__":
    main()
