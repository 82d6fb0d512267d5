"""Scripts in which one request is evicted again and again by others that come at the right moments."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

from runahead.runtime.plan import PLAN_WORDS
from tests.runtime.programs.hash_model import VOCAB
from tests.simulation.script import Ask, Script, World

_LONGEST: Final = 96
_BLOCKS: Final = _LONGEST // 4


def besieged(script: Script) -> Script:
    """One long request, and others of a higher priority that come again and again and take its blocks."""
    dice = random.Random(script.seed)
    world = _narrow(script.world, dice.choice((2, 3)))
    gap, tokens, asks = dice.choice((6, 12, 20, 30)), dice.choice((30, 50, 70)), []
    for handle in range(24):
        ask = Ask(10 + gap * handle, 1, f"r{handle}", _prompt(dice, 4), handle, tokens, ignore_eos=True, priority=1)
        asks.append(ask if handle else replace(ask, turn=0, max_tokens=_LONGEST, priority=0))
    return Script(script.seed, world, tuple(asks), ())


def besieged_in_its_prompt(script: Script) -> Script:
    """A long prompt whose log-probabilities are wanted, a few tokens a launch, beside others of a higher priority that
    grow into its blocks: it is evicted when some of them are sent and some are not."""
    dice = random.Random(script.seed)
    world = replace(_narrow(script.world, dice.choice((4, 5))), prefill_chunk=4, max_prefill_tokens=4)
    asks = []
    for handle in range(6):  # three that grow, and later some more
        turn = handle if handle < 3 else dice.randint(20, 80)
        prompt, tokens = _prompt(dice, dice.randint(3, 5)), dice.randint(60, 80)
        asks.append(Ask(turn, 2, "", prompt, handle, tokens, ignore_eos=True, priority=dice.choice((0, 1))))
    for handle in range(6, 8):  # and their victims
        prompt, tokens = _prompt(dice, dice.randint(38, 48)), dice.randint(1, 12)
        asks.append(Ask(handle - 3, 1, "", prompt, handle, tokens, prompt_logprobs=handle - 6, priority=-1))
    asks.sort(key=lambda ask: ask.turn)
    named = tuple(replace(ask, request_id=f"r{handle}") for handle, ask in enumerate(asks))
    return Script(script.seed, world, named, ())


def _narrow(world: World, max_rows: int) -> World:
    """Blocks for one request at its longest."""
    return replace(
        world, max_rows=max_rows, num_blocks=1 + _BLOCKS, block_size=4, context_length=_LONGEST, max_queue=100,
        plan_words=PLAN_WORDS,
    )  # fmt: skip


def _prompt(dice: random.Random, count: int) -> tuple[int, ...]:
    return tuple(dice.randrange(2, VOCAB) for _ in range(count))
