"""A script that goes wrong made smaller, greedily, while it still goes wrong in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from tests.simulation.compare import check_script
from tests.simulation.completions import completion, completions_of, without_asks
from tests.simulation.life import Broken
from tests.simulation.script import SERIAL, Ask, Script

MOST_RUNS: Final = 400


def breaks(script: Script) -> Broken | None:
    """How it goes wrong."""
    try:
        check_script(script)
    except Broken as broken:
        return broken
    return None


def shrink(broken: Broken, most_runs: int = MOST_RUNS, attempt: Callable[[Script], Broken | None] = breaks) -> Broken:
    """The smallest of the scripts tried that breaks the same invariant."""
    runs = 0
    best = broken
    while True:
        for smaller in _smaller(best.script, best.depth):
            runs += 1
            if runs > most_runs:
                return best
            found = attempt(smaller)
            if found is not None and found.what == broken.what:
                best = found
                break
        else:
            return best


def _smaller(script: Script, depth: int) -> Iterator[Script]:
    """Scripts with less in them, the largest steps first."""
    world = script.world
    if len(world.depths) > 1:
        yield replace(script, world=replace(world, depths=() if depth == SERIAL else (depth,)))
    size = len(script.asks) // 2
    while size:
        for start in range(0, len(script.asks), size):
            yield without_asks(script, range(start, start + size))
        size //= 2
    size = max(1, len(script.events) // 2) if script.events else 0
    while size:
        for start in range(0, len(script.events), size):
            yield replace(script, events=script.events[:start] + script.events[start + size :])
        size //= 2
    for handle, ask in enumerate(script.asks):
        for simpler in _simpler(ask) if not ask.index else ():
            same = completions_of(script.asks, handle)
            others = [completion(simpler, script.asks[one].index) for one in same[1:]]
            yield replace(script, asks=(*script.asks[:handle], simpler, *others, *script.asks[same.stop :]))
    if world.device_seed >= 0:
        yield replace(script, world=replace(world, device_seed=-1))
    if world.log_interval:
        yield replace(script, world=replace(world, log_interval=0))
    if world.turn_s or world.pause_s:
        yield replace(script, world=replace(world, turn_s=0.0, pause_s=0.0))


def _simpler(ask: Ask) -> Iterator[Ask]:
    plain = replace(
        ask, min_tokens=0, stop_token_ids=(), priority=0, salt="", repetition=1.0, presence=0.0, frequency=0.0,
        prompt_logprobs=-1, sick_logits=-1, sick_hidden=-1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, bias=(),
        allowed=(), logprobs=-1,
    )  # fmt: skip
    if plain != ask:
        yield plain
    if len(ask.prompt) > 1 and ask.sick_logits < 0 and ask.sick_hidden < 0:
        yield replace(ask, prompt=ask.prompt[: len(ask.prompt) // 2])
    if ask.max_tokens > 1:
        yield replace(ask, max_tokens=ask.max_tokens // 2, min_tokens=min(ask.min_tokens, ask.max_tokens // 2))
    if ask.turn:
        yield replace(ask, turn=ask.turn // 2)
