"""A script without an end, from a seed: what front ends ask of an engine, turn by turn, with aborts, cancelled streams
and front ends that are lost. It counts from 0."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import numpy as np

from runahead.runtime.scheduler.request import Request
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit
from tests.runtime.programs.hash_model import VOCAB

CONTEXT: Final = 64
BLOCK_SIZE: Final = 8
_BUSY: Final = 10  # requests served at a time, beyond which nobody asks for more
_LULL: Final = 1500  # turns, on average, from one time when nobody asks until all is quiet to the next
_FRONT_ENDS: Final = 2
_PREFIXES: Final = 3


class Endless:
    """Asks what a request may ask for, so that rows run out of blocks and find each other's prefixes."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._handle = 0
        self._call = 0
        self._owners = list(range(1, _FRONT_ENDS + 1))
        self._prefixes = [self._tokens(24) for _ in range(_PREFIXES)]
        self._is_lull = False

    def messages(self, served: Sequence[Request]) -> list[tuple[int, m.ToEngine | None]]:
        """What arrives before the next turn, by front end; None: it is gone. served: requests that have not ended."""
        dice, told = self._dice, list[tuple[int, m.ToEngine | None]]()
        self._is_lull = bool(served) if self._is_lull else dice.random() < 1 / _LULL
        if not self._is_lull and len(served) < _BUSY and dice.random() < 0.2:
            told += [self._submit(served) for _ in range(dice.choice((1, 1, 1, 3)))]
        if served and dice.random() < 0.04:
            told.append(self._interrupt(dice.choice(served)))
        if dice.random() < 0.01:
            told.append((dice.choice(self._owners), m.StatsQuery(self._next_call())))
        if dice.random() < 0.0005:
            told.append((dice.choice(self._owners), m.Abort(self._next_call(), (), all_requests=True)))
        if dice.random() < 0.006:
            told.append(self._lose())
        return told

    def _next_call(self) -> int:
        self._call += 1
        return self._call

    def _tokens(self, count: int) -> list[int]:
        return [self._dice.randrange(2, VOCAB) for _ in range(count)]

    def _submit(self, served: Sequence[Request]) -> tuple[int, m.ToEngine]:
        """Now and then one that is refused: its id is taken, or the prompt too long."""
        dice = self._dice
        self._handle += 1
        prompt = dice.choice(self._prefixes)[: dice.randrange(25)] if dice.random() < 0.5 else []
        prompt = prompt + self._tokens(CONTEXT if dice.random() < 0.01 else dice.randint(1, 20))
        request_id = dice.choice(served).request_id if served and dice.random() < 0.01 else f"r{self._handle}"
        max_tokens = dice.choice((1, 8, 20, 30, 60))
        has_penalty = dice.random() < 0.15
        submit = prepared_submit(
            handle=self._handle,
            request_id=request_id,
            prompt=np.array(prompt, np.int32),
            sampling=SamplingParams(
                seed=dice.getrandbits(63),
                prompt_logprobs=dice.choice((0, 2)) if dice.random() < 0.1 else -1,
                repetition_penalty=1.5 if has_penalty else 1.0,
                frequency_penalty=0.25 if has_penalty else 0.0,
            ),
            stopping=StoppingParams(
                max_tokens=max_tokens,
                min_tokens=dice.choice((0, 0, min(max_tokens, 4))),
                stop_token_ids=tuple(dice.sample(range(VOCAB), dice.choice((0, 0, 3)))),
                ignore_eos=dice.random() < 0.5,
            ),
            block_size=BLOCK_SIZE,
            priority=dice.choice((0, 0, 0, 1)),
            cache_salt=dice.choice(("", "", "", "pepper")),
        )
        return dice.choice(self._owners), submit

    def _interrupt(self, request: Request) -> tuple[int, m.ToEngine]:
        """It is aborted, from whichever front end, or its own one gives it up."""
        dice = self._dice
        if dice.random() < 0.6:
            ids = (request.request_id, "nobody") if dice.random() < 0.1 else (request.request_id,)
            return dice.choice(self._owners), m.Abort(self._next_call(), ids)
        return request.owner, m.Cancel(request.handle, dice.choice((FinishReason.CANCELLED, FinishReason.STOP)))

    def _lose(self) -> tuple[int, None]:
        """A front end is gone, and another one comes."""
        place = self._dice.randrange(len(self._owners))
        lost, self._owners[place] = self._owners[place], max(self._owners) + 1
        return lost, None
