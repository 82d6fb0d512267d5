"""Draws the chain as it ran: some launches of a steady decode, `serial` above and `run_ahead=2` below.

python -m benchmarks.chain_picture docs/chain.svg [--device cuda]
python -m benchmarks.chain_picture docs/chain-prompt.svg --prompt 1500

With `--prompt` a prompt of so many tokens comes while the rows decode, in chunks and launches of 256 tokens, and what
is drawn begins with the launch before its first. The engine, the device and the model are the real ones. What is drawn
is what `runahead trace` shows of a service.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

import runahead.runtime.models
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
_DRAWN: Final = 140  # launches of the run's end
_RUN: Final = 200  # launches of the whole run
PACE: Final = {"prefill_chunk": 256, "max_prefill_tokens": 256, "run_ahead_tokens": 512}  # with a prompt


class SilentFrontEnd:
    """One front end that asks for completions and reads none."""

    def __init__(self) -> None:
        self._asked: list[tuple[int, m.ToEngine | None]] = []

    def submit(self, handle: int, block_size: int, prompt: int = 8) -> None:
        """More tokens than the run has launches."""
        message = prepared_submit(
            handle,
            f"r{handle}",
            1 + np.arange(prompt, dtype=np.int32) % 250,
            SamplingParams(),
            StoppingParams(max_tokens=2 * _RUN if prompt < 9 else 2, ignore_eos=True),
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


def record(run_ahead: int, device: DeviceName, model: Path = BUNDLED, prompt: int = 0) -> Timeline:
    """A steady decode of ROWS rows, its last launches; or with a prompt, from the launch before its first one on.

    Raises ValueError for a prompt that the model's context does not hold.
    """
    config = EngineConfig(model=str(model), device=device, run_ahead=run_ahead)
    if prompt:
        config = msgspec.structs.replace(config, **PACE)
    parts = assemble(config, lambda done, total: None)
    if prompt + 2 > parts.info.context_length:
        raise ValueError(f"a prompt of {prompt} tokens does not fit the context of {parts.info.context_length}")
    front_end = SilentFrontEnd()
    engine = Engine(parts.device, parts.scheduler, front_end, max_queue=ROWS)
    for handle in range(1, ROWS + 1):
        front_end.submit(handle, parts.info.block_size)
    while engine.ledger.retired < _RUN:
        engine.turn()
    if prompt:
        front_end.submit(ROWS + 1, parts.info.block_size, prompt)
        while front_end.has_more or len(engine.registry) > ROWS:
            engine.turn()
    parts.device.close()
    timeline = timeline_of(as_response(engine.recorder.trace(_DRAWN), shares_clock=device == "cpu"))
    return around_the_prompt(timeline) if prompt else timeline


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
    chosen = parser.parse_args()
    machine = torch.cuda.get_device_name() if chosen.device == "cuda" else f"{platform.machine()} CPU"
    record_at = partial(record, device=chosen.device, model=chosen.model, prompt=chosen.prompt)
    panels = [(f"run_ahead={depth}" if depth else "serial", record_at(depth)) for depth in (0, 2)]
    for name, timeline in panels:
        print("\n".join([name, *figures(timeline)]))
    model = "the bundled model" if chosen.model == BUNDLED else chosen.model.name
    beside = f" beside a prompt of {chosen.prompt:,} tokens" if chosen.prompt else ""
    caption = f"{machine}, {model}, {ROWS} rows{beside}. Figures above a tick: the launch enqueued there."
    chosen.out.write_text(picture(panels, caption), encoding="utf-8")


if __name__ == "__main__":
    main()
