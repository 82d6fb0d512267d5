"""Keys that a front end sends with a prompt find blocks, and do nothing else: a lie changes nobody's tokens."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import KEY_BYTES, prepared_submit
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.pressure import whole

DEPTHS = [0, 1, 2, 4]
BLOCK = 8
FIRST, OTHER, SECOND, THIRD = ([value] * BLOCK for value in (11, 22, 33, 44))


def keys_of(prompt: list[int]) -> list[bytes]:
    keys = submit(0, prompt).block_keys
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def submit(handle: int, prompt: list[int]) -> m.Submit:
    return prepared_submit(
        handle,
        f"r{handle}",
        np.array(prompt, np.int32),
        SamplingParams(),
        StoppingParams(5, ignore_eos=True),
        block_size=BLOCK,
    )


def ask(chain: Chain, handle: int, prompt: list[int], keys: list[bytes] | None = None) -> int:
    """Serve it alone. Returns the tokens of its prompt that were cached."""
    message = submit(handle, prompt)
    chain.tell(message if keys is None else msgspec.structs.replace(message, block_keys=b"".join(keys)))
    chain.run()
    return chain.finished()[handle][0].cached_tokens


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_block_is_made_findable_under_the_key_of_its_own_prefix_whatever_key_was_sent(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    honest, lying = [*FIRST, *SECOND, 5], [*OTHER, *SECOND, 5]
    ask(chain, 1, lying, [keys_of(lying)[0], keys_of(honest)[1]])
    assert ask(chain, 2, honest) == 0, "nothing of it was computed"
    assert ask(chain, 3, lying) == 2 * BLOCK, "all of it was, and is found by its own keys"
    assert chain.tokens() == {1: whole(lying, 5), 2: whole(honest, 5), 3: whole(lying, 5)}


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_block_is_found_behind_its_own_prefix_alone_whatever_key_was_sent(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    honest, lying = [*FIRST, *SECOND, *THIRD, 5], [*OTHER, *SECOND, *THIRD, 5]
    ask(chain, 1, honest)
    ask(chain, 2, [*OTHER, 5])
    assert ask(chain, 3, lying, [keys_of(lying)[0], *keys_of(honest)[1:]]) == BLOCK
    assert chain.tokens()[3] == whole(lying, 5)
    assert ask(chain, 4, [*lying, *FIRST, 7]) == 3 * BLOCK
    assert chain.tokens()[4] == whole([*lying, *FIRST, 7], 5)


@pytest.mark.parametrize("depth", DEPTHS)
def test_keys_that_are_nonsense_cost_the_prefix_and_nothing_else(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    prompt = [*FIRST, *SECOND, 5]
    ask(chain, 1, prompt)
    assert ask(chain, 2, prompt, [b"\0" * KEY_BYTES] * 2) == 0
    assert ask(chain, 3, prompt) == 2 * BLOCK
    assert chain.tokens() == {handle: whole(prompt, 5) for handle in (1, 2, 3)}
    chain.check_nothing_is_left()
