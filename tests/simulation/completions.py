"""Scripts in which some prompts have several completions: each is an ask of its own, behind the first one's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.simulation.script import ANYONE, Ask, Event, Script

_MOST = 5


def with_completions(seed: int, script: Script) -> Script:
    """Of some seeds: prompts have several completions, often more than there are rows."""
    dice = random.Random(f"{seed} completions")
    if dice.random() > 0.5:
        return script
    asks, names = list[Ask](), {ANYONE: ANYONE}
    for handle, ask in enumerate(script.asks):
        names[handle] = len(asks)
        asks.append(ask)
        is_healthy_prompt = ask.sick_hidden < 0 or ask.sick_hidden >= len(ask.prompt)
        if is_healthy_prompt and dice.random() < 0.4:
            asks += [completion(ask, index) for index in range(1, dice.randint(2, _MOST))]
    events = tuple(_renamed(event, names) for event in script.events)
    return replace(script, asks=tuple(asks), events=events)


def completion(first: Ask, index: int) -> Ask:
    """Completion `index` of the prompt: it is healthy, and is told nothing of the prompt."""
    return replace(first, index=index, seed=first.seed + index, prompt_logprobs=-1, sick_logits=-1, sick_hidden=-1)


def completions_of(asks: Sequence[Ask], handle: int) -> range:
    """The handles of all completions of this one's prompt."""
    first = handle - asks[handle].index
    end = first + 1
    while end < len(asks) and asks[end].index == end - first:
        end += 1
    return range(first, end)


def without_asks(script: Script, gone: range) -> Script:
    """Events of requests that are left follow them to their new handles. The completions behind one that is gone are
    gone, too."""
    kept = list[int]()
    for handle, ask in enumerate(script.asks):
        if handle not in gone and (not ask.index or (kept and kept[-1] == handle - 1)):
            kept.append(handle)
    names = {ANYONE: ANYONE, **{old: new for new, old in enumerate(kept)}}
    events = tuple(_renamed(event, names) for event in script.events if event.handle in names)
    return replace(script, asks=tuple(script.asks[handle] for handle in kept), events=events)


def _renamed(event: Event, names: dict[int, int]) -> Event:
    return replace(event, handle=names[event.handle], also=tuple(names[one] for one in event.also if one in names))
