"""Scripts of a few requests, written by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tests.simulation.compare import check_script
from tests.simulation.script import DEPTHS, Ask, Event, Mode, Script, World

WORLD = World(
    Mode.PLAIN, DEPTHS, device_seed=5, max_rows=2, num_blocks=33, block_size=4, context_length=64, prefill_chunk=8,
    max_prefill_tokens=8,
)  # fmt: skip


def ask(handle: int, turn: int = 0, owner: int = 1) -> Ask:
    prompt = tuple(range(2 + handle, 42 + handle))
    return Ask(turn, owner, f"r{handle}", prompt, seed=1000 + handle, max_tokens=20, ignore_eos=True)


def counts_of(asks: tuple[Ask, ...], *events: Event, **world: float | Mode) -> Counter[str]:
    """What happened at all depths together, once everything that was promised was kept."""
    script = Script(0, replace(WORLD, **world), asks, events)  # type: ignore[arg-type]
    return sum((witness.counts for witness in check_script(script)), Counter[str]())
