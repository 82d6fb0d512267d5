"""Requests that come, go, are aborted and lose their front end at random: the chain's rules hold after every turn."""

from __future__ import annotations

from collections import Counter

import pytest

from runahead.runtime.wire.parameters import FinishReason
from tests.runtime.lifecycles import lived

SEEDS = range(100)
# No logits of these lives are sick, nobody has a grammar, and a cancelled request's end is told to nobody.
_NEVER_HERE = (
    FinishReason.NOT_FINISHED,
    FinishReason.NON_FINITE,
    FinishReason.CANCELLED,
    FinishReason.NOTHING_LEFT,
    FinishReason.STRUCTURE_LOST,
    FinishReason.STRUCTURE_COST,
    FinishReason.STRUCTURE_MISMATCH,
)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_of_a_random_life_is_answered_exactly_and_nothing_is_left(seed: int) -> None:
    life = lived(seed)
    assert life.chain.quiet
    life.chain.check_nothing_is_left()
    assert life.chain.engine.stats().barriers["test"] > 0


def test_these_lives_saw_every_kind_of_event() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        seen += lived(seed).events
    phases = ("on its way", "waiting", "prefill", "decode", "finished")
    wanted = {
        *(f"{what} {phase}" for what in ("abort", "cancel") for phase in phases),
        *(f"lost {phase}" for phase in ("waiting", "prefill", "decode")),
        *(f"row compared in {phase}" for phase in ("prefill", "decode")),
        *(f"ended {reason.name}" for reason in FinishReason if reason not in _NEVER_HERE),
        *("refused INVALID_ARGUMENT", "refused RESOURCE_EXHAUSTED"),
        *("abort all", "void row", "held back", "overlapped launch"),
    }
    missing = sorted(wanted - seen.keys())
    assert not missing, "the lives lost their point: this never happened"


def test_these_lives_were_lived_at_every_depth_and_with_one_row() -> None:
    ledgers = [lived(seed).chain.ledger for seed in SEEDS]
    assert {ledger.run_ahead for ledger in ledgers} == {0, 1, 2, 3, 4}
    assert 1 in {ledger.scheduler.rows.max_rows for ledger in ledgers}
