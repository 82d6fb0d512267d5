"""The simulator sees mistakes in how tokens are drawn and described: each of these breaks a seed soon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import runahead.runtime.scheduler.new_row
import tests.runtime.programs.hash_draw
import tests.runtime.programs.hash_program
from runahead.cuda_graphs.device import Form
from runahead.runtime.engine.publisher import Publisher
from runahead.runtime.programs.cpu.rows import HostRows
from runahead.runtime.row_record import read_admission
from runahead.runtime.scheduler.new_row import needs_full
from runahead.runtime.scheduler.outcomes import Commit
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.simulation.test_can_fail import broken_seeds, is_seen

_admit, _logprobs = HostRows._admit, Publisher._logprobs
_draw = tests.runtime.programs.hash_draw.draw


def full_without_filters(sampling: SamplingParams, stopping: StoppingParams) -> bool:
    return sampling.has_penalty or bool(sampling.bias_ids or sampling.allowed_mask or stopping.min_tokens)


def full_without_masks(sampling: SamplingParams, stopping: StoppingParams) -> bool:
    return sampling.has_penalty or sampling.has_filter or sampling.logprobs >= 0


def full_without_log_probabilities(sampling: SamplingParams, stopping: StoppingParams) -> bool:
    return needs_full(sampling, stopping) and sampling.logprobs < 0


def masks_stay(rows: HostRows, bulk: NDArray[np.int32], offset: int) -> None:
    before = rows.allowed_words.copy()
    _admit(rows, bulk, offset)
    rows.allowed_words[:] = np.maximum(rows.allowed_words, before)


def a_neighbours_temperature(rows: HostRows, bulk: NDArray[np.int32], offset: int) -> None:
    _admit(rows, bulk, offset)
    slot = read_admission(bulk, offset).word("row_slot")
    rows.temperature[slot] = rows.temperature[slot - 1]


Mask = NDArray[np.int32] | None


def half_a_seed(rows: HostRows, slot: int, digest: int, position: int, form: Form, mask: Mask) -> int:
    return _draw(rows, slot, digest ^ (int(rows.seed[slot]) >> 32 << 32 & (1 << 64) - 1), position, form, mask)


def the_token_before(rows: HostRows, slot: int, digest: int, position: int, form: Form, mask: Mask) -> int:
    return _draw(rows, slot, digest, position - 1, form, mask)


def of_another_row(publisher: Publisher, commit: Commit, mine: NDArray[np.intp] | slice) -> tuple[m.Logprobs, ...]:
    return _logprobs(publisher, commit._replace(cells=commit.cells[::-1]), mine)


def of_another_token(publisher: Publisher, commit: Commit, mine: NDArray[np.intp] | slice) -> tuple[m.Logprobs, ...]:
    return _logprobs(publisher, commit, mine)[:1]


# Seeds that break after few launches.
SOON: dict[Callable[..., Any], int] = {
    full_without_filters: 53,
    full_without_masks: 42,
    full_without_log_probabilities: 13,
    masks_stay: 20,
    half_a_seed: 2,
    the_token_before: 13,
    of_another_row: 7,
    of_another_token: 1,
}


@pytest.mark.parametrize(
    ("place", "name", "mistake"),
    [
        pytest.param(place, name, mistake, id=mistake.__name__)
        for place, name, mistakes in (
            (
                runahead.runtime.scheduler.new_row,
                "needs_full",
                [full_without_filters, full_without_masks, full_without_log_probabilities],
            ),
            (HostRows, "_admit", [masks_stay, a_neighbours_temperature]),
            (tests.runtime.programs.hash_program, "draw", [half_a_seed, the_token_before]),
            (Publisher, "_logprobs", [of_another_row, of_another_token]),
        )
        for mistake in mistakes
    ],
)
def test_whatever_is_drawn_or_described_wrongly_is_seen(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, mistake: Callable[..., Any]
) -> None:
    monkeypatch.setattr(place, name, mistake)
    assert is_seen(next(broken_seeds(first=SOON.get(mistake, 0)), None))
