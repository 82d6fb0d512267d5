"""The simulator sees mistakes: each of these, made on purpose, breaks a seed soon, and what is left of it is small."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from runtime.ledger import Ledger
from runtime.lifecycle import Deferred, Eviction, Release
from runtime.rows import Rows
from runtime.slot_pool import NO_SLOT
from tests.simulation.generate import make_script
from tests.simulation.life import Broken
from tests.simulation.script import Script, read_script
from tests.simulation.shrink import breaks, shrink

Early = Callable[[Ledger[Deferred], int, Deferred], int]


def let_go_early(monkeypatch: pytest.MonkeyPatch, when: Early) -> None:
    """The fence lets things go when `when` says so."""
    defer = Ledger.defer
    monkeypatch.setattr(
        Ledger, "defer", lambda ledger, number, resource: defer(ledger, when(ledger, number, resource), resource)
    )


def blocks_at_commit(ledger: Ledger[Deferred], number: int, resource: Deferred) -> int:
    return ledger.committed if isinstance(resource, Release) and resource.blocks else number


def slots_after_f(ledger: Ledger[Deferred], number: int, resource: Deferred) -> int:
    return number - 1 if isinstance(resource, Release) and resource.slot != NO_SLOT else number


def evicted_after_f(ledger: Ledger[Deferred], number: int, resource: Deferred) -> int:
    return number - 1 if isinstance(resource, Eviction) else number


def broken_seeds() -> Iterator[Broken]:
    for seed in (2, 7, 9, *range(60)):  # the first three see these mistakes soon
        broken = breaks(make_script(seed))
        if broken is not None:
            yield broken


@pytest.mark.parametrize("early", [blocks_at_commit, slots_after_f, evicted_after_f])
def test_whatever_the_fence_lets_go_too_early_is_seen(monkeypatch: pytest.MonkeyPatch, early: Early) -> None:
    let_go_early(monkeypatch, early)
    assert next(broken_seeds())


def test_a_broken_script_shrinks_is_kept_and_breaks_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(Rows, "still", lambda rows, slots, epochs: epochs >= 0)  # late tokens count
    broken = next(broken_seeds())
    small = shrink(broken, most_runs=60)
    assert small.what == broken.what
    assert len(small.script.asks) < len(broken.script.asks)
    path = tmp_path_factory.mktemp("kept") / "small.json"
    small.script.write(path)
    kept: Script = read_script(path)
    assert kept == small.script
    again = breaks(kept)
    assert again is not None and again.what == broken.what
    monkeypatch.undo()
    assert breaks(kept) is None
