"""The mask worker's process: what it answers, and what becomes of its requests when it is gone."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from runahead.runtime import models
from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.grammar.matcher import load_vocabulary
from runahead.runtime.masks.mask_memory import ASKED, HANDLED
from runahead.runtime.masks.mask_worker import COMMAND, MaskWorker
from runahead.runtime.masks.masks import GivenUp, Stops
from runahead.runtime.masks.worker_messages import Begin
from runahead.runtime.models.read_config import load_config
from runahead.runtime.wire.parameters import FinishReason
from tests.runtime.masks.one_row import read_mask

BUNDLED = Path(models.__path__[0]) / "bundled"
YES = '{"grammars":[{"lark_grammar":"start: \\"yes\\""}]}'
YES_OR_NO = '{"grammars":[{"lark_grammar":"start: \\"yes\\" | \\"no\\""}]}'
DEAD_END = (
    '{"grammars":[{"json_schema":{"type":"object","properties":{"a":{}},"required":["a"],'
    '"patternProperties":{"^a$":{}},"additionalProperties":false,"x-guidance":{"whitespace_flexible":false}}}]}'
)
STOPPED = (sys.executable, "-c", "import signal; signal.pause()")
NO_GRAMMAR = '{"grammars":[{"lark_grammar":"start: nobody"}]}'


@contextmanager
def worker(
    command: tuple[str, ...] = COMMAND, processor_s: float = 20.0, running_s: float = 60.0
) -> Iterator[tuple[MaskWorker, list[str]]]:
    config = load_config(open_checkpoint(BUNDLED))
    said: list[str] = []
    begin = Begin(str(BUNDLED), config.vocab_size, config.eos_token_ids, 4)
    made = MaskWorker(begin, said.append, command, processor_s, running_s)
    try:
        yield made, said
    finally:
        made.stop()


def until(reached: Callable[[], object]) -> None:
    """Wait for what another process does."""
    for _ in range(6000):
        if reached():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def given_up(made: MaskWorker) -> list[GivenUp]:
    """Requests that are followed no further, once there are some."""
    found: list[GivenUp] = []

    def look() -> bool:
        found.extend(made.given_up(0.0))
        return bool(found)

    until(look)
    return found


def lost(made: MaskWorker) -> list[int]:
    """The same, by their numbers alone."""
    return [order for order, _ in given_up(made)]


def test_masks_come_from_another_process_and_only_once_somebody_asks() -> None:
    with worker() as (made, said):
        assert made.pid is None, "nobody has asked"
        made.open(1, YES)
        made.place(1, 2, 5, np.zeros(9, np.int32))
        until(lambda: read_mask(made.memory, 2, 5, 9) is not None)
        assert made.pid not in (None, os.getpid())
        mask = read_mask(made.memory, 2, 5, 9)
        assert mask is not None
        first = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])
        made.take(np.array([1], np.int64), np.array([first], np.int32))
        until(lambda: read_mask(made.memory, 2, 5, 10) is not None)
        made.close(1)
        assert list(made.given_up(0.0)) == []
        until(lambda: made.figures().orders_waiting == 0)
        figures = made.figures()
        assert (figures.written, figures.grammars_compiled, figures.grammars_known, figures.restarts) == (2, 1, 0, 0)
        assert not said


def test_what_is_no_grammar_loses_its_request_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with worker() as (made, said):
        made.open(1, NO_GRAMMAR)
        made.open(2, YES)
        assert lost(made) == [1]
        made.place(2, 0, 1, np.zeros(3, np.int32))
        until(lambda: read_mask(made.memory, 0, 1, 3) is not None)
        assert not said
    assert "nobody" not in "".join(capfd.readouterr()), "a grammar was printed"


def test_its_death_ends_the_requests_that_it_knew_and_the_next_one_gets_another_process() -> None:
    with worker() as (made, said):
        for order in (1, 2, 3):
            made.open(order, YES)
        made.close(2)
        first = made.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert lost(made) == [1, 3]
        assert len(said) == 1 and "2 requests" in said[0]
        made.place(1, 0, 1, np.zeros(3, np.int32))
        made.take(np.array([1], np.int64), np.array([1], np.int32))
        made.close(1)
        made.open(4, YES)
        made.place(4, 0, 2, np.zeros(3, np.int32))
        until(lambda: read_mask(made.memory, 0, 2, 3) is not None)
        assert made.pid not in (None, first) and made.figures().restarts == 1
        assert list(made.given_up(0.0)) == []


def test_one_that_died_while_nobody_needed_it_costs_nobody_a_request() -> None:
    with worker() as (made, _):
        made.open(1, YES)
        made.close(1)
        process = made._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: process.poll() is not None)
        made.open(2, YES)
        made.place(2, 0, 1, np.zeros(3, np.int32))
        until(lambda: read_mask(made.memory, 0, 1, 3) is not None)


def test_one_that_does_nothing_is_ended() -> None:
    with worker(STOPPED, running_s=8.0) as (made, said):
        made.open(1, YES)
        assert [list(made.given_up(100.0 + second)) for second in range(8)] == [[]] * 8
        assert list(made.given_up(108.0)) == [GivenUp(1, FinishReason.STRUCTURE_LOST)]
        assert made.pid is None and len(said) == 1


def test_a_gap_between_two_looks_is_no_silence() -> None:
    """The engine was stopped with its worker."""
    with worker(STOPPED, running_s=8.0) as (made, _):
        made.open(1, YES)
        assert [list(made.given_up(now)) for now in (100.0, 200.0, 300.0, 301.0, 302.0, 303.0, 304.0, 305.0)] == [
            []
        ] * 8
        assert list(made.given_up(306.0)) == [GivenUp(1, FinishReason.STRUCTURE_LOST)]


def test_the_time_of_an_order_begins_with_it() -> None:
    """Before it the worker had nothing to do, and nobody looked."""
    with worker(STOPPED, running_s=8.0) as (made, _):
        for order in (1, 2):
            made.open(order, YES)
            assert [list(made.given_up(100.0 * order + second)) for second in range(8)] == [[]] * 8
            made.memory.figures[HANDLED] = made._sent  # it has carried it out
            assert list(made.given_up(100.0 * order + 8.0)) == []
            made._open.discard(order)  # as when it has given the request up


def test_one_that_computes_for_too_long_is_ended_by_its_own_time_alone() -> None:
    with worker((sys.executable, "-c", "while True: pass"), processor_s=0.5) as (made, said):
        made.open(1, YES)
        assert given_up(made) == [GivenUp(1, FinishReason.STRUCTURE_LOST)], "on a clock that stands still"
        assert "processor time" in said[0]


def test_one_that_compiles_for_ever_is_ended_though_it_carries_out_orders() -> None:
    with worker(STOPPED, running_s=8.0) as (made, _):
        made.open(1, YES)
        made.memory.figures[ASKED] += 1
        for second in range(8):
            assert list(made.given_up(100.0 + second)) == []
            made.close(2)
            made.memory.figures[HANDLED] = made._sent
        assert list(made.given_up(108.0)) == [GivenUp(1, FinishReason.STRUCTURE_LOST)]


def test_its_memory_is_there_before_anybody_writes_to_it() -> None:
    with worker() as (made, _):
        about = os.fstat(made._file)
        assert about.st_blocks * 512 >= about.st_size > 0


def test_one_that_a_signal_ends_is_reported_with_it() -> None:
    with worker((sys.executable, "-c", "import os; os.kill(os.getpid(), 7)")) as (made, said):
        made.open(1, YES)
        assert lost(made) == [1]
        assert "it has ended (signal SIGBUS)" in said[0]


def test_one_that_can_not_be_started_loses_the_request() -> None:
    with worker(("/nonexistent/python",)) as (made, said):
        made.open(1, YES)
        made.place(1, 0, 1, np.zeros(3, np.int32))
        made._command = COMMAND
        made.open(2, YES)
        assert list(made.given_up(0.0)) == [GivenUp(1, FinishReason.STRUCTURE_LOST)], (
            "whoever comes after it may find one"
        )
        made.place(2, 0, 1, np.zeros(3, np.int32))
        until(lambda: read_mask(made.memory, 0, 1, 3) is not None)
        assert len(said) == 1 and "can be started" in said[0]


def test_it_ends_with_whoever_started_it() -> None:
    with worker() as (made, _):
        made.open(1, YES)
        process = made._process
        assert process is not None
        made._socket.close()
        assert process.wait(timeout=60) == 0


def test_a_dead_end_is_told_from_a_limit() -> None:
    with worker() as (made, _):
        vocabulary = load_vocabulary(open_checkpoint(BUNDLED).tokenizer(), made._begin.vocab_size, (0,))
        made.open(1, DEAD_END)
        made.place(1, 0, 1, np.zeros(3, np.int32))
        until(lambda: read_mask(made.memory, 0, 1, 3) is not None)
        tokens = np.array(vocabulary.tokenize_str('{"a":8,'), np.int32)
        made.take(np.full(len(tokens), 1), tokens)
        assert given_up(made) == [GivenUp(1, FinishReason.NOTHING_LEFT)]


def test_a_grammar_at_its_limits_is_told_from_a_worker_that_is_gone() -> None:
    """Whoever sends the first again meets the same limits."""
    with worker() as (made, _):
        made.open(1, NO_GRAMMAR)
        assert given_up(made) == [GivenUp(1, FinishReason.STRUCTURE_COST)]
        made.open(2, YES)
        assert made.pid is not None
        os.kill(made.pid, signal.SIGKILL)
        assert given_up(made) == [GivenUp(2, FinishReason.STRUCTURE_LOST)]


def test_what_it_writes_aside_is_logged_where_it_can_repeat_nothing_of_a_request(
    capfd: pytest.CaptureFixture[str],
) -> None:
    panic = "thread '<unnamed>' panicked at parser/src/earley/lexer.rs:12:7:"
    lines = panic + "\nsecret schema\n"
    code = f"import sys; print('secret'); sys.stderr.write({lines!r}); sys.exit(3)"
    with worker((sys.executable, "-c", code)) as (made, said):
        made.open(1, YES)
        assert lost(made) == [1]
        assert said == [
            f"the mask worker says: {panic}",
            "the mask worker is gone: it has ended (exit code 3); 1 requests with a grammar end with it; 1 lines that "
            "it wrote are not shown, since they may repeat a request",
        ]
    assert capfd.readouterr() == ("", ""), "nothing of it is inherited"


def test_one_that_can_not_begin_says_why() -> None:
    said: list[str] = []
    made = MaskWorker(Begin("/nowhere", 64, (1,), 4), said.append)
    made.open(1, YES)
    assert lost(made) == [1]
    assert "it can't start" in said[0] and "/nowhere" in said[0]
    made.stop()


def test_stops_of_a_caller_reach_it() -> None:
    with worker() as (made, _):
        made.open(1, YES_OR_NO)
        made.place(1, 2, 5, np.zeros(9, np.int32))
        until(lambda: read_mask(made.memory, 2, 5, 9) is not None)
        mask = read_mask(made.memory, 2, 5, 9)
        assert mask is not None
        every = tuple(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
        made.open(2, YES_OR_NO, Stops(every[1:], 10))
        made.place(2, 3, 5, np.zeros(9, np.int32))
        until(lambda: read_mask(made.memory, 3, 5, 9) is not None)
        left = read_mask(made.memory, 3, 5, 9)
        assert left is not None and np.unpackbits(left.view(np.uint8)).sum() == 1 < len(every)
