"""Small pools in which rows run out of blocks at a known launch, and what the tests ask of them.

Blocks hold 8 tokens. Launch 1 prefills; launch n samples the token at position prompt + n - 2, and reserves a block
where that is a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runahead.runtime.scheduler.request import Request
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.programs.hash_model import completion

SHORTAGE = 13  # the launch for which blocks are lacking


def whole(prompt: list[int], count: int) -> list[int]:
    """What the model answers if nothing stops it."""
    return completion(prompt, 0, count, stops=())


def request_of(chain: Chain, handle: int) -> Request:
    tracked = chain.engine.registry.by_id(f"r{handle}")
    assert tracked is not None, f"request {handle} is not being served"
    return tracked.request


def phase_of(chain: Chain, handle: int) -> str:
    return chain.engine.scheduler.holdings.phase_of(request_of(chain, handle))


def events(chain: Chain, kind: str) -> int:
    """How often something happened so far."""
    found = chain.engine.stats().events.get(kind)
    return found.count if found else 0


def turn_until_event(chain: Chain, kind: str) -> None:
    chain.turn_until(lambda: events(chain, kind))


def two_of_a_kind(depth: int, **options: Any) -> Chain:
    """Requests 1 and 2, prompts of 13, both in need of a block at SHORTAGE, none left, none coming."""
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + 6, **options)
    for handle in (1, 2):
        chain.submit(handle, [handle + 2] * 13, max_tokens=20, ignore_eos=True)
    return chain


def one_above_another(depth: int, asks_low: Callable[[Chain], None] | None = None, **options: Any) -> Chain:
    """Request 1, of the higher priority, is in need of a block at SHORTAGE; request 2 holds three and needs none.

    asks_low: submits request 2, with `LOW_PROMPT`, in its own way.
    """
    chain = make_chain(depth, schedule=no_step, num_blocks=1 + 6, **options)
    chain.submit(1, HIGH_PROMPT, max_tokens=20, ignore_eos=True, priority=1)
    if asks_low is None:
        chain.submit(2, LOW_PROMPT, max_tokens=20, ignore_eos=True)
    else:
        asks_low(chain)
    return chain


HIGH_PROMPT = [3] * 13
LOW_PROMPT = [4] * 9
