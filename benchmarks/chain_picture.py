"""Draws the chain as it ran: some launches of a steady decode, `serial` above and `run_ahead=2` below.

python -m benchmarks.chain_picture docs/chain.svg [--device cuda --shape 8B]
python -m benchmarks.chain_picture docs/chain-prompt.svg --prompt 1500
python -m benchmarks.chain_picture docs/chain-prompt.svg --prompt 8192 --device cuda --shape 8B

With `--prompt` a prompt of so many tokens comes while the rows decode, in chunks and launches of 256 tokens, and what
is drawn begins with the launch before its first. The engine and the device are the real ones, and so is the model but
for `--shape`: then it has random weights in the shape of one of the benchmark's. What is drawn is what `runahead trace`
shows of a service. One engine runs both, `serial` and two launches ahead.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

import runahead.runtime.models
from benchmarks.gpu_table.prompts import of_long_prompts
from benchmarks.gpu_table.shapes import SHAPES
from runahead.runtime.engine.loop import Engine
from runahead.runtime.process.assemble import assemble
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import DeviceName, EngineConfig
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.runtime.wire.preparation import prepared_submit
from runahead.service.commands.chain_picture import SHOWN, picture
from runahead.service.commands.timeline import Timeline, timeline_of
from runahead.service.commands.trace_command import figures
from runahead.service.stats.trace import as_response

BUNDLED: Final = Path(runahead.runtime.models.__path__[0]) / "bundled"
ROWS: Final = 8
DEPTHS: Final = (0, 2)
_DRAWN: Final = 140  # launches of the run's end
_RUN: Final = 200  # launches of the whole run
_CONTEXT: Final = 1024  # tokens that a shape's positions hold at least
PACE: Final = {"prefill_chunk": 256, "max_prefill_tokens": 256, "run_ahead_tokens": 512}  # with a prompt


class SilentFrontEnd:
    """One front end that asks for completions and reads none."""

    def __init__(self) -> None:
        self._asked: list[tuple[int, m.ToEngine | None]] = []

    def submit(self, handle: int, block_size: int, prompt: int = 8) -> None:
        """More tokens than the run has launches. No prompt begins as an earlier one does: the prefix cache would have
        it, and no launch would carry it."""
        message = prepared_submit(
            handle,
            f"r{handle}",
            1 + (handle + np.arange(prompt, dtype=np.int32)) % 250,
            SamplingParams(),
            StoppingParams(max_tokens=2 * _RUN if prompt < 9 else 2, ignore_eos=True),
            block_size=block_size,
        )
        self._asked.append((1, message))

    def abort_all(self) -> None:
        self._asked.append((1, m.Abort(0, (), True)))

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


class Recorder:
    """An engine, and what it did at one depth after the other. model: a checkpoint's folder. prompt: tokens of one that
    comes while the rows decode; 0: none does.

    Raises ValueError for a prompt that the model's context does not hold.
    """

    def __init__(self, device: DeviceName, model: Path = BUNDLED, prompt: int = 0, load_format: str = "auto") -> None:
        config = msgspec.convert(
            {
                "model": str(model), "device": device, "run_ahead": max(DEPTHS), "load_format": load_format,
                "max_rows": 2 * ROWS, **(PACE if prompt else {}),
            },
            EngineConfig,
        )  # fmt: skip
        parts = assemble(config, lambda done, total: None)
        if prompt + 2 > parts.info.context_length:
            raise ValueError(f"a prompt of {prompt} tokens does not fit the context of {parts.info.context_length}")
        self._front_end, self._block_size = SilentFrontEnd(), parts.info.block_size
        self._engine = Engine(parts.device, parts.scheduler, self._front_end, max_queue=ROWS)
        self._shares_clock, self._prompt, self._handles = device == "cpu", prompt, count(1)

    def record(self, run_ahead: int) -> Timeline:
        """A steady decode of ROWS rows, its last launches; or with a prompt, those from the one before its first on."""
        engine, front_end = self._engine, self._front_end
        engine.ledger.run_ahead = run_ahead
        for _ in range(ROWS):
            front_end.submit(next(self._handles), self._block_size)
        until = engine.ledger.retired + _RUN
        while engine.ledger.retired < until:
            engine.turn()
        if self._prompt:
            front_end.submit(next(self._handles), self._block_size, self._prompt)
            while front_end.has_more or len(engine.registry) > ROWS:
                engine.turn()
        trace = engine.recorder.trace(_DRAWN)
        front_end.abort_all()
        while front_end.has_more or len(engine.registry) or engine.ledger.in_flight:
            engine.turn()
        timeline = timeline_of(as_response(trace, shares_clock=self._shares_clock))
        return around_the_prompt(timeline) if self._prompt else timeline

    def close(self) -> None:
        self._engine.device.close()


def around_the_prompt(timeline: Timeline) -> Timeline:
    """Some launches from the one before the first of the newest prompt on."""
    places = [place for place, launch in enumerate(timeline.launches) if launch.prompt_tokens]
    first = next(place for place in places if timeline.launches[place].kind == "mixed")
    return replace(timeline, launches=timeline.launches[max(0, first - 1) :][:SHOWN])


def main() -> None:
    """Run, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the SVG file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--model", type=Path, default=BUNDLED, help="a checkpoint's folder (default: the bundled model)"
    )
    parser.add_argument("--prompt", type=int, default=0, metavar="TOKENS", help="a prompt of so many comes meanwhile")
    parser.add_argument("--shape", choices=SHAPES, metavar="NAME", help="random weights instead: " + ", ".join(SHAPES))
    chosen = parser.parse_args()
    machine = torch.cuda.get_device_name() if chosen.device == "cuda" else f"{platform.machine()} CPU"
    with tempfile.TemporaryDirectory(prefix="runahead-") as folder:
        model, load_format, name = chosen.model, "auto", chosen.model.name
        if chosen.shape:
            model, load_format, name = Path(folder), "dummy", f"{chosen.shape} (random weights)"
            of_long_prompts(SHAPES[chosen.shape], max(_CONTEXT, chosen.prompt + 256)).write(model)
        recorder = Recorder(chosen.device, model, chosen.prompt, load_format)
    panels = [(f"run_ahead={depth}" if depth else "serial", recorder.record(depth)) for depth in DEPTHS]
    recorder.close()
    for title, timeline in panels:
        print("\n".join([title, *figures(timeline)]))
    name = "the bundled model" if model == BUNDLED else name
    beside = f" beside a prompt of {chosen.prompt:,} tokens" if chosen.prompt else ""
    caption = f"{machine}, {name}, {ROWS} rows{beside}. Figures above a tick: the launch enqueued there."
    chosen.out.write_text(picture(panels, caption), encoding="utf-8")


if __name__ == "__main__":
    main()
