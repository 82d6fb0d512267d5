"""A steady decode looks at its cells alone, and at everything as soon as a cell is not what it was."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from runahead.cuda_graphs.device import LaunchShape
from runahead.cuda_graphs.rings import NON_FINITE, STOPPED, VOID, CellError
from runahead.runtime.scheduler.ledger import Launch, LedgerError
from runahead.runtime.scheduler.outcomes import Commit
from runahead.runtime.scheduler.steady_decode import KeptRows
from runahead.runtime.wire import messages as m
from tests.runtime.chain import Chain, make_chain
from tests.runtime.programs.hash_model import VOCAB, completion


class Looks:
    """How many commits took over what is the same: `short`; and how many looked at every row: `long`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.short = self.long = 0
        commit_kept = KeptRows.commit

        def counted(kept: KeptRows, launch: Launch, cells: NDArray[np.int64]) -> Commit | None:
            commit = commit_kept(kept, launch, cells)
            self.short += commit is not None
            self.long += commit is None
            return commit

        monkeypatch.setattr(KeptRows, "commit", counted)


def steady(looks: Looks, stop_token_ids: tuple[int, ...] = ()) -> Chain:
    """Three rows in a decode whose commits take over what is the same."""
    chain = make_chain(1)
    for handle in (1, 2, 3):
        chain.submit(handle, [handle, 2, 3], max_tokens=60, ignore_eos=True, stop_token_ids=stop_token_ids)
    chain.turn_until(lambda: looks.short > 3)
    return chain


def test_a_steady_decode_looks_at_its_cells_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    chain = steady(looks)
    before, long = chain.ledger.committed, looks.long
    short = looks.short
    for _ in range(20):
        chain.turn()
    assert looks.short - short == chain.ledger.committed - before == 20
    assert looks.long == long


def test_the_launch_with_which_a_row_begins_brings_the_tokens_of_the_others_as_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Looks(monkeypatch)
    chain = steady(looks)
    seen = []
    chain.submit(4, [4, 2, 3], max_tokens=60, ignore_eos=True)
    for _ in range(4):
        short, long = looks.short, looks.long
        chain.turn()
        seen.append((looks.short - short, looks.long - long))
    assert chain.is_running("r4")
    assert seen == [(1, 0), (0, 1), (1, 0), (1, 0)], "its own first token is looked at"


def test_a_row_that_has_ended_brings_no_token_however_steady_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    chain = steady(looks)
    chain.tell(m.Abort(1, ("r2",)))
    chain.run()
    assert len(chain.tokens()[2]) < 60, "it was aborted half way, and `tokens` has seen none after its end"
    assert chain.engine.stats().void_rows == 1
    assert {handle: len(tokens) for handle, tokens in chain.tokens().items() if handle != 2} == {1: 60, 3: 60}


def altered(chain: Chain, change: int) -> None:
    """Every further cell of the second row is not what S has left there."""
    sample = chain.program.sample

    def changed(shape: LaunchShape) -> None:
        sample(shape)
        rings = chain.device.rings
        rings.cells[rings.slot(shape.number), 1, 0] ^= change

    chain.program.sample = changed  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (STOPPED, LedgerError, "host and device disagree on which rows ended"),
        (NON_FINITE, LedgerError, "host and device disagree on which rows ended"),
        (VOID, CellError, "the device ended a row that goes on"),
        (1 << 32, CellError, "its result slot holds another launch's tokens"),
        (-1 << 63, CellError, "its result slot holds another launch's tokens"),
    ],
)
def test_a_cell_that_says_more_than_a_token_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, change: int, error: type[Exception], why: str
) -> None:
    looks = Looks(monkeypatch)
    chain = steady(looks)
    altered(chain, change)
    with pytest.raises(error, match=why):
        chain.turn()


def test_a_stop_id_that_the_device_did_not_see_is_noticed_in_a_steady_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    sampled = {token for handle in (1, 2, 3) for token in completion([handle, 2, 3], 0, 60, stops=set())}
    unseen = next(token for token in range(VOCAB) if token not in sampled)
    chain = steady(looks, stop_token_ids=(unseen,))
    sample = chain.program.sample

    def stops(shape: LaunchShape) -> None:
        sample(shape)
        rings = chain.device.rings
        cell = rings.cells[rings.slot(shape.number), 1:2, 0]
        cell.view(np.int32)[0] = unseen

    chain.program.sample = stops  # type: ignore[method-assign]
    with pytest.raises(LedgerError, match="host and device disagree on which rows ended"):
        chain.turn()


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_rows_of_a_steady_decode_end_by_their_length_with_their_last_token(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    looks = Looks(monkeypatch)
    chain = make_chain(depth)
    for handle, tokens in ((1, 30), (2, 31), (3, 45)):
        chain.submit(handle, [handle, 2, 3], max_tokens=tokens, ignore_eos=True)
    chain.run()
    assert looks.short > 20
    assert {handle: len(tokens) for handle, tokens in chain.tokens().items()} == {1: 30, 2: 31, 3: 45}
    assert all(len(ends) == 1 for ends in chain.finished().values())
