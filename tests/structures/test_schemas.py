"""Whatever ends by itself fits its schema, at every depth, beside plain rows; and its tokens are those of serial."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from runahead.runtime.wire.parameters import FinishReason, SamplingParams
from tests.structures.schemas import schema_of
from tests.structures.structured_engine import grammar_of, structured_engine

DEPTHS = (0, 1, 2, 4)
PLAIN = 10_000  # handles of rows without a grammar begin behind this
MAX_TOKENS = 220


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


def test_drafts_of_plain_rows_change_no_token() -> None:
    """The plain rows repeat themselves, and what they said before is drafted."""
    tokens = {}
    for drafter in ("none", "ngram"):
        with structured_engine(2, drafter=drafter, load_format="auto") as chain:
            for handle in range(1, 7):
                structure = grammar_of(schema_of(handle)) if handle % 2 else ""
                greedy = SamplingParams(temperature=0.0)
                chain.submit(handle, structure=structure, sampling=None if structure else greedy, max_tokens=80)
            chain.run()
            assert chain.engine.scheduler.drafts.drafted.sum() > 0 or drafter == "none"
            tokens[drafter] = chain.tokens
    assert tokens["ngram"] == tokens["none"]
