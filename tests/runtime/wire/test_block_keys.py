"""Keys that a front end makes of a prompt's blocks."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest

from runahead.runtime.wire.prompts import KEY_BYTES, prompt_keys

PROMPT = np.arange(11, dtype=np.int32)


def test_a_key_is_of_the_salt_hashed_twice_and_of_every_token_up_to_the_blocks_end() -> None:
    first = sha256(sha256(sha256(b"salt").digest()).digest() + PROMPT[:4].tobytes()).digest()
    second = sha256(first + PROMPT[4:8].tobytes()).digest()
    assert prompt_keys("salt", PROMPT, 4) == first + second


@pytest.mark.parametrize(("tokens", "keys"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_full_blocks_alone_have_keys(tokens: int, keys: int) -> None:
    assert len(prompt_keys("", PROMPT[:tokens], 4)) == keys * KEY_BYTES


def test_prompts_that_differ_in_one_early_token_share_no_later_key() -> None:
    other = PROMPT.copy()
    other[0] += 1
    mine, theirs = prompt_keys("", PROMPT, 4), prompt_keys("", other, 4)
    assert mine[:KEY_BYTES] != theirs[:KEY_BYTES] and mine[KEY_BYTES:] != theirs[KEY_BYTES:]
