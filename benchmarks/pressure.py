"""What one request, or thousands, cost everybody else: turns of the engine's loop under pressure beside quiet ones.

Two engines in one process, on the null device, with the same rows in decode. One is left alone, the other is pressed;
their turns are timed alternately, so that a stall of the machine shows in both. What is timed is the thread's processor
time, so that other processes of a shared machine do not count; `--wall` takes the time on the wall. With
`--beside TREE`, the same cases run in another tree of this repository too, case by case in turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.checkouts import check_comes_from, environment_of
from benchmarks.pressed_engine import CHUNK, EOS, VOCAB, PressedEngine
from runahead.runtime.token_mask import token_mask
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams

ROWS: Final = (8, 64)
GOAL_RATIO: Final = 1.5  # at p99
GOAL_US: Final = 1000.0  # at p99.9
_TOGETHER: Final = 25  # turns of one engine before the other's
_LONG: Final = 32_768
_PENALTY: Final = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5)

Pressure = Callable[[PressedEngine], Iterator[None]]  # whatever happens before a `yield` is not timed; one turn is then


@dataclass(frozen=True, slots=True)
class Case:
    """options: of `PressedEngine`, beside its rows. turns: of each engine, timed."""

    name: str
    press: Pressure
    options: dict[str, Any] = field(default_factory=dict)
    turns: int = 3000


@dataclass(frozen=True, slots=True)
class Turns:
    """Microseconds of a turn of the loop, of the thread's own processor time unless told otherwise."""

    p50: float
    p99: float
    p999: float

    @classmethod
    def of(cls, times: list[float]) -> Turns:
        return cls(*np.quantile(times, (0.5, 0.99, 0.999)).tolist())


def _prompt(seed: int, tokens: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(EOS + 1, VOCAB, tokens, np.int32)


# ---------------------------------------------------------------- what waits


def nothing(world: PressedEngine) -> Iterator[None]:
    """What two quiet engines differ by."""
    while True:
        yield


def prefix_waits(world: PressedEngine) -> Iterator[None]:
    """32k tokens of the first in the queue are cached, and there are no blocks for the rest of it."""
    cached = _prompt(1, _LONG)
    handle = world.front_end.submit(cached, 64)
    world.turn_until(lambda: world.phase_of(handle) == "DECODE")
    world.front_end.tell(m.Cancel(handle))
    world.turn_until(lambda: world.phase_of(handle) == "GONE")
    pool = world.engine.scheduler.pool
    tail = _prompt(2, (pool.available + 1) * pool.block_size - cached.size)  # a block more than there are
    world.front_end.submit(np.concatenate([cached, tail]), 1)
    world.waits_for(1)
    for _ in range(100):  # rows take blocks, and fill others: the prompt might lie in these, for all that is known
        world.turn_us()
    while True:
        yield


def penalties_wait(count: int) -> Pressure:
    def press(world: PressedEngine) -> Iterator[None]:
        """Every penalty slot is taken, and many wait for one."""
        for _ in range(count):
            world.front_end.submit(_prompt(1, 16), 16, _PENALTY)
        world.waits_for(count)
        while True:
            yield

    return press


def priorities(world: PressedEngine) -> Iterator[None]:
    """4,000 of random priorities wait; every turn another one comes, and one of them goes."""
    draw = np.random.default_rng(1)
    handles = [world.front_end.submit(_prompt(1, 16), 16, priority=int(draw.integers(-9, 10))) for _ in range(4000)]
    world.waits_for(4000)
    while True:
        place = int(draw.integers(len(handles)))
        world.front_end.tell(m.Cancel(handles[place]))
        handles[place] = world.front_end.submit(_prompt(1, 16), 16, priority=int(draw.integers(-9, 10)))
        yield


# ---------------------------------------------------------------- what is admitted


def admitted(sampling: SamplingParams, tokens: int) -> Pressure:
    def press(world: PressedEngine) -> Iterator[None]:
        """One is admitted every 32 turns or so, and gone a few turns later."""
        prompt = _prompt(1, tokens)
        while True:
            handle = world.front_end.submit(prompt, 64, sampling)
            while world.phase_of(handle) in ("GONE", "WAITING"):
                yield
            yield
            yield
            world.front_end.tell(m.Cancel(handle))
            for _ in range(28):
                yield

    return press


def readmitted(world: PressedEngine) -> Iterator[None]:
    """A row with penalties, 32k tokens of prompt and a completion of some hundred loses its row, and has it again."""
    handle = world.front_end.submit(_prompt(1, _LONG), 1 << 16, _PENALTY)
    world.turn_until(lambda: world.phase_of(handle) == "DECODE")
    for _ in range(500):
        world.turn_us()
    while True:
        if world.phase_of(handle) == "DECODE":
            request = world.request(handle)
            world.engine.scheduler.evict(request)
            request.evictions = 0  # or it would be admitted only when everybody fits at their longest
        for _ in range(CHUNK):
            yield


# ---------------------------------------------------------------- what arrives


def arrivals(world: PressedEngine) -> Iterator[None]:
    """1,000 arrive between two turns, and are gone before the next 1,000."""
    while True:
        handles = [world.front_end.submit(_prompt(1, 16), 16) for _ in range(1000)]
        for _ in range(300):
            yield
        world.waits_for(1000)
        for handle in handles:
            world.front_end.tell(m.Cancel(handle))
        world.waits_for(0)


def stats(world: PressedEngine) -> Iterator[None]:
    """Somebody asks for Stats every turn."""
    while True:
        world.front_end.tell(m.StatsQuery(1))
        yield


def aborted_by_id(world: PressedEngine) -> Iterator[None]:
    """4,000 wait, and a message names 1,000 of them."""
    while True:
        handles = [world.front_end.submit(_prompt(1, 16), 16) for _ in range(4000)]
        world.waits_for(4000)
        world.front_end.tell(m.Abort(1, world.ids(handles[::4]), False))
        for _ in range(500):
            yield
        for part in range(1, 4):
            world.front_end.tell(m.Abort(1, world.ids(handles[part::4]), False))
        world.waits_for(0)


def all_aborted(world: PressedEngine) -> Iterator[None]:
    """4,000 wait, and a message ends all, the rows that decode with them."""
    while True:
        for _ in range(4000):
            world.front_end.submit(_prompt(1, 16), 16)
        world.waits_for(4000)
        for _ in range(50):
            yield
        world.front_end.tell(m.Abort(1, (), True))
        while len(world.engine.registry):
            yield
        world.start_rows()


def cancelled(world: PressedEngine) -> Iterator[None]:
    """1,000 wait, and all of them are cancelled between two turns."""
    while True:
        handles = [world.front_end.submit(_prompt(1, 16), 16) for _ in range(1000)]
        world.waits_for(1000)
        for handle in handles:
            world.front_end.tell(m.Cancel(handle))
        for _ in range(300):
            yield
        world.waits_for(0)


def lost(world: PressedEngine) -> Iterator[None]:
    """A front end with 1,000 requests is gone."""
    while True:
        other = world.connect("other")
        for _ in range(1000):
            other.submit(_prompt(1, 16), 16)
        world.waits_for(1000)
        world.disconnect(other)
        for _ in range(300):
            yield
        world.waits_for(0)


_WHOLE = SamplingParams(temperature=1.0, allowed_mask=token_mask(range(VOCAB), VOCAB).tobytes())

CASES: Final = (
    Case("nothing", nothing),
    Case("32k prefix waits for blocks", prefix_waits, {"spare_rows": 4, "blocks": 8000}, 1000),
    Case("1,000 wait for a penalty slot", penalties_wait(1000), {"spare_rows": 4}),
    Case("4,000 wait for a penalty slot", penalties_wait(4000), {"spare_rows": 4}),
    Case("4,000 wait, of all priorities", priorities),
    Case("short prompt admitted", admitted(SamplingParams(), 16), {"spare_rows": 4}),
    Case("whole vocabulary allowed", admitted(_WHOLE, 16), {"spare_rows": 4}),
    Case("32k prompt admitted", admitted(SamplingParams(), _LONG), {"spare_rows": 4}),
    Case("32k prompt with penalties", admitted(_PENALTY, _LONG), {"spare_rows": 4, "penalty_slots": 8}),
    Case("the same, readmitted", readmitted, {"spare_rows": 4, "penalty_slots": 8}),
    Case("1,000 arrive at once", arrivals),
    Case("Stats every turn", stats),
    Case("1,000 of 4,000 aborted by id", aborted_by_id),
    Case("all of 4,000 aborted", all_aborted),
    Case("1,000 cancelled at once", cancelled),
    Case("front end lost with 1,000", lost),
)


def measure(case: Case, rows: int, clock: Callable[[], int]) -> tuple[Turns, Turns]:
    """Turns of the engine that is left alone, and of the one that is pressed."""
    quiet, pressed = PressedEngine(rows, clock, **case.options), PressedEngine(rows, clock, **case.options)
    pressing = case.press(pressed)
    quiet_us: list[float] = []
    pressed_us: list[float] = []
    gc.collect()
    gc.freeze()  # as the engine's process does
    while len(quiet_us) < case.turns:
        quiet_us += [quiet.turn_us() for _ in range(_TOGETHER)]
        for _ in range(_TOGETHER):
            next(pressing)
            pressed_us.append(pressed.turn_us())
    quiet.close()
    pressed.close()
    return Turns.of(quiet_us), Turns.of(pressed_us)


# ---------------------------------------------------------------- the table


def _measured(tree: Path, case: Case, rows: int, wall: bool) -> tuple[Turns, Turns]:
    """Of a process of its own, which runs the case as that tree has it."""
    command = [sys.executable, "-m", "benchmarks.pressure", "--only", case.name, "--rows", str(rows), "--json"]
    done = subprocess.run(
        command + ["--wall"] * wall, cwd=tree, env=environment_of(tree), check=True, stdout=subprocess.PIPE
    )
    quiet, pressed = json.loads(done.stdout)
    return Turns(**quiet), Turns(**pressed)


def _line(name: str, rows: int, quiet: Turns, pressed: Turns) -> str:
    ratio = pressed.p99 / quiet.p99
    met = "yes" if ratio <= GOAL_RATIO and pressed.p999 <= max(GOAL_US, quiet.p999) else "no"
    columns = (
        f"{f'{q:.0f} / {p:.0f}':>15}"
        for q, p in zip((quiet.p50, quiet.p99, quiet.p999), (pressed.p50, pressed.p99, pressed.p999), strict=True)
    )
    return f"{name:<44} {rows:>4} {' '.join(columns)} {ratio:>8.2f} {met:>5}"


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), help="rows that decode meanwhile")
    parser.add_argument("--only", nargs="*", default=[case.name for case in CASES], help="names of cases")
    parser.add_argument("--beside", type=Path, help="another tree of this repository, measured case by case in turn")
    parser.add_argument("--wall", action="store_true", help="time on the wall, not the thread's processor time")
    parser.add_argument("--json", action="store_true", help="measure one case in this process")
    chosen = parser.parse_args(arguments)
    cases = [case for case in CASES if case.name in chosen.only]
    if chosen.json:
        check_comes_from(Path(__file__).resolve().parents[1], SamplingParams)
        clock = time.perf_counter_ns if chosen.wall else time.thread_time_ns
        print(json.dumps([asdict(turns) for turns in measure(cases[0], chosen.rows[0], clock)]))
        return
    here = Path(__file__).resolve().parents[1]
    trees = {"": here} if chosen.beside is None else {"there: ": chosen.beside.resolve(), "here:  ": here}
    print(f"quiet / pressed; goals: p99 {GOAL_RATIO:g} x the quiet one, p99.9 {GOAL_US:.0f} us or as the quiet one")
    print(f"{'':<44} {'rows':>4} {'p50 us':>15} {'p99 us':>15} {'p99.9 us':>15} {'p99 x':>8} {'goal':>5}")
    for case in cases:
        for rows in chosen.rows:
            for name, tree in trees.items():
                print(_line(name + case.name, rows, *_measured(tree, case, rows, chosen.wall)), flush=True)


if __name__ == "__main__":
    main()
