"""The mask worker's own parts."""

from __future__ import annotations

import select

import pytest

from runahead.runtime.masks import worker
from runahead.runtime.masks.grammar_rows import GrammarRows
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.masks.worker import Compiler
from runahead.runtime.masks.worker_messages import Lost
from runahead.runtime.wire.parameters import FinishReason

TIMEOUT_S = 30.0


class Panic(BaseException):
    """As a panic of the library is: no Exception."""


@pytest.mark.parametrize("error", [Panic, ValueError])
def test_a_request_whose_grammar_the_library_fails_over_is_lost_and_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fails(vocabulary: object, grammar: str) -> None:
        raise error

    monkeypatch.setattr(worker, "new_matcher", fails)
    compiler = Compiler(None)
    rows = GrammarRows(MaskMemory(1, 64), 64, compiler.soon)
    rows.open(7, "{}")
    rows.place(7, 0, 1, 4)
    assert select.select([compiler.done], [], [], TIMEOUT_S)[0], "it says when it is done"
    compiler.collect(rows)
    assert rows.lost == [Lost(7, FinishReason.STRUCTURE_COST)]
    compiler._pool.shutdown()
    compiler.done.close()
    compiler._tell.close()
