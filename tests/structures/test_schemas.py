"""Whatever ends by itself fits its schema, at every depth, beside plain rows; and its tokens are those of serial."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.wire.parameters import FinishReason, SamplingParams
from tests.schemas import SCHEMAS, Schema
from tests.structures.structured_engine import grammar_of, structured_engine

DEPTHS = (0, 1, 2, 4)
PLAIN = 10_000  # handles of rows without a grammar begin behind this
MAX_TOKENS = 220
WORDY = {
    "type": "object",
    "properties": {
        "given_name_of_the_person": {"type": "string", "maxLength": 6},
        "is_registered_since_last_year": {"type": "boolean"},
    },
    "required": ["given_name_of_the_person", "is_registered_since_last_year"],
    "additionalProperties": False,
}


def schema_of(number: int) -> Schema:
    """Each of them once, and of every kind among the first."""
    return SCHEMAS[77 * number % len(SCHEMAS)]


def completed(depth: int, count: int, **config: Any) -> tuple[dict[int, list[int]], int, int]:
    """Completions of so many schemas, and of a plain row for every fourth. Returns tokens by handle, how many ended by
    themselves, and how many rows were held."""
    with structured_engine(depth, **config) as chain:
        for number in range(count):
            chain.submit(1 + number, structure=grammar_of(schema_of(number)), max_tokens=MAX_TOKENS)
            if number % 4 == 0:
                plain = PLAIN + number
                chain.submit(plain, sampling=SamplingParams(seed=plain), max_tokens=60, ignore_eos=True)
        chain.run()
        ended = 0
        for number in range(count):
            reason = chain.ends[1 + number]
            assert reason in (FinishReason.END_OF_SEQUENCE, FinishReason.LENGTH), reason
            if reason is FinishReason.END_OF_SEQUENCE:
                ended += 1
                said = json.loads(chain.text(1 + number))
                jsonschema.Draft202012Validator(schema_of(number)).validate(said)
        assert all(len(chain.tokens[handle]) == 60 for handle in chain.ends if handle >= PLAIN)
        return chain.tokens, ended, chain.engine.scheduler.tally.counters["held_rows"]


def test_completions_fit_their_schemas_at_every_depth(pytestconfig: pytest.Config) -> None:
    count = pytestconfig.getoption("--schemas")
    expected, ended, _ = completed(0, count)
    print(f"\n{ended} of {count} have ended by themselves and fit their schemas")
    assert ended >= 0.9 * count
    held = 0
    for depth in DEPTHS[1:]:
        tokens, also, rows = completed(depth, count)
        held += rows
        print(f"depth {depth}: {also} of {count}; {rows} times a row was held")
        assert tokens == expected, f"depth {depth}"
    assert held, "every mask was there before it was looked for"


def drafted(drafter: str, depth: int, **config: Any) -> tuple[dict[int, list[int]], int]:
    """Completions of a trained model, structured and plain ones that repeat themselves, and how many drafts of launches
    were right."""
    with structured_engine(depth, drafter=drafter, load_format="auto", **config) as chain:
        for handle in range(1, 10):
            structure = grammar_of(WORDY if handle == 1 else schema_of(handle)) if handle % 2 else ""
            sampling = SamplingParams(temperature=0.0 if handle % 4 < 2 else 0.8, seed=handle)
            chain.submit(handle, structure=structure, sampling=sampling, max_tokens=80)
        chain.run()
        return chain.tokens, int(chain.engine.scheduler.drafts.accepted.sum())


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_what_grammars_force_and_what_is_guessed_change_no_token(drafter: str) -> None:
    """The names in a schema are forced, and come several tokens a launch."""
    expected, none = drafted("none", 0, draft_forced=False)
    assert not none
    for depth in (0, 2, 4):
        tokens, right = drafted(drafter, depth)
        assert tokens == expected, f"depth {depth}"
        assert right > 10


def test_forced_tokens_that_the_grammar_does_not_force_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are guesses like all others: nothing of them is accepted unseen."""
    expected, _ = drafted("none", 0)
    read = MaskMemory.read_forced

    def wrong(memory: MaskMemory, slot: int, epoch: int, position: int, newest: int, count: int) -> NDArray[np.int32]:
        found = read(memory, slot, epoch, position, newest, count)
        return found + np.int32(1) if found.size else np.array([7, 8, 9], np.int32)

    monkeypatch.setattr(MaskMemory, "read_forced", wrong)
    tokens, right = drafted("none", 2)
    assert tokens == expected and right == 0
