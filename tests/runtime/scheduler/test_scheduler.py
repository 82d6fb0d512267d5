"""The scheduler alone: where prompts are cut, and what it makes of result cells."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from runahead.cuda_graphs.rings import NON_FINITE, STOPPED, cell_tag
from runahead.cuda_graphs.shape import Form, LaunchShape
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.plan import CHUNK_ROW, CHUNK_START, CHUNK_TOKENS, PLAN_WORDS
from runahead.runtime.scheduler.ledger import Launch, Ledger, LedgerError
from runahead.runtime.scheduler.outcomes import Deferred
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams, StoppingParams
from tests.cuda_graphs.simulated_device import seeded_schedule
from tests.runtime.chain import make_chain, tightest_plan
from tests.runtime.programs.hash_program import HashProgram
from tests.runtime.scheduler.played import record_of

CHUNK = 16


class ChunkRecorder(HashProgram):
    """Writes down the chunks of every request, which it tells by the seed."""

    def apply(self, shape: LaunchShape) -> int:
        read = super().apply(shape)
        self.cuts: dict[int, list[tuple[int, int]]] = getattr(self, "cuts", {})
        for chunk in self.rows.chunks.tolist():
            seed = int(self.rows.seed[self.rows.rows[chunk[CHUNK_ROW]]])
            self.cuts.setdefault(seed, []).append((chunk[CHUNK_START], chunk[CHUNK_TOKENS]))
        return read


def cut_alone(prompt_len: int) -> list[tuple[int, int]]:
    return [(start, min(CHUNK, prompt_len - start)) for start in range(0, prompt_len, CHUNK)]


@pytest.mark.parametrize("budget", [CHUNK, CHUNK + 3, 2 * CHUNK, 2 * CHUNK + 7, 5 * CHUNK - 1])
@pytest.mark.parametrize("tight", [False, True], ids=["wide plan", "tight plan"])
@pytest.mark.parametrize("seed", range(4))
def test_where_a_prompt_is_cut_depends_on_the_request_alone(budget: int, seed: int, tight: bool) -> None:
    dice = random.Random(seed)
    chain = make_chain(
        dice.randint(0, 4),
        schedule=seeded_schedule(seed),
        max_rows=5,
        prefill_chunk=CHUNK,
        max_prefill_tokens=budget,
        program_type=ChunkRecorder,
        plan_words=tightest_plan(5, CHUNK, 8) + 12 if tight else PLAN_WORDS,
    )
    lengths = {handle: dice.choice((1, CHUNK - 1, CHUNK, CHUNK + 1, dice.randint(1, 100))) for handle in range(1, 25)}
    for handle, length in lengths.items():
        chain.submit(handle, [handle] * length, seed=handle, max_tokens=dice.randint(1, 20), ignore_eos=True)
        for _ in range(dice.randint(0, 3)):
            chain.turn()
    chain.run()
    assert isinstance(chain.program, ChunkRecorder)
    assert chain.program.cuts == {handle: cut_alone(length) for handle, length in lengths.items()}


def test_a_chunk_that_does_not_fit_beside_its_neighbours_waits_and_is_not_cut() -> None:
    chain = make_chain(prefill_chunk=CHUNK, max_prefill_tokens=2 * CHUNK, program_type=ChunkRecorder)
    for handle in (1, 2):
        chain.submit(handle, [handle] * 60, seed=handle, max_tokens=3)
    chain.turn()
    assert chain.is_running("r1")
    assert chain.is_running("r2")
    scheduler = chain.engine.scheduler
    scheduler.limits = replace(scheduler.limits, max_prefill_tokens=CHUNK + 4)  # not for two chunks any more
    chain.run()
    assert isinstance(chain.program, ChunkRecorder)
    assert chain.program.cuts == {1: cut_alone(60), 2: cut_alone(60)}


class FormRecorder(HashProgram):
    """Writes down for each S its form and whether a row that it samples wants a bias."""

    def sample(self, shape: LaunchShape) -> None:
        self.forms: list[tuple[Form, bool]] = getattr(self, "forms", [])
        _, slots = self.rows.to_sample()
        self.forms.append((shape.form, bool(self.rows.bias_count[slots].any())))
        super().sample(shape)


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_launch_has_the_full_form_while_one_of_its_sampled_rows_needs_it_and_no_longer(depth: int) -> None:
    chain = make_chain(depth, program_type=FormRecorder)
    chain.submit(1, [3, 4], max_tokens=40, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    biased = SamplingParams(bias_ids=(5,), bias_values=(1.0,))
    prompt = np.full(40, 6, np.int32).tobytes()
    chain.tell(m.Submit(2, "r2", prompt, biased, StoppingParams(5, ignore_eos=True)))
    chain.run()
    assert isinstance(chain.program, FormRecorder)
    assert {form for form, _ in chain.program.forms} == {Form.PLAIN, Form.FULL}
    assert all((form == Form.FULL) == wanted for form, wanted in chain.program.forms)


# ---------------------------------------------------------------- commits


def one_row(stopping: StoppingParams, context_length: int = 64) -> tuple[Scheduler, Launch]:
    """A scheduler with one row, prompt [3, 4], and the launch whose S brings its first token."""
    limits = SchedulerLimits(context_length, 97, (1,), 16, 32, PLAN_WORDS, 4096)
    ledger: Ledger[Deferred] = Ledger(2, 512)
    scheduler = Scheduler(limits, Rows(2, 8, context_length), BlockPool(9, 8), ledger)
    prompt = np.array([3, 4], np.int32)
    max_len = min(prompt.size + stopping.max_tokens, context_length)
    scheduler.submit(Request(1, 7, "r7", prompt, SamplingParams(), stopping, max_len))
    launches = []
    for _ in range(2):
        planned = scheduler.plan()
        assert planned is not None
        launches.append(record_of(planned))
        ledger.enqueue(launches[-1])
    assert scheduler.commits.commit(launches[0], np.zeros((0, 1), np.int64)).tokens.size == 0
    return scheduler, launches[1]


def cell(launch: Launch, low: int) -> np.ndarray:
    return np.array([[cell_tag(launch.number) | low]], np.int64)


def test_a_commit_brings_the_token_to_the_hosts_truth() -> None:
    scheduler, launch = one_row(StoppingParams(10))
    commit = scheduler.commits.commit(launch, cell(launch, 42))
    assert (commit.tokens.tolist(), commit.owners.tolist(), commit.handles.tolist()) == ([42], [1], [7])
    assert commit.firsts.tolist() == [True]
    assert commit.endings == ()
    assert (scheduler.rows.committed_len[0], scheduler.rows.history[0, 2]) == (3, 42)


@pytest.mark.parametrize("token", [1, 50], ids=["end of sequence", "stop id"])
def test_below_min_tokens_a_stop_id_is_a_token_like_any_other(token: int) -> None:
    scheduler, launch = one_row(StoppingParams(10, min_tokens=2, stop_token_ids=(50,)))
    assert scheduler.commits.commit(launch, cell(launch, token)).endings == ()
    with pytest.raises(LedgerError, match="disagree"):
        scheduler.commits.commit(launch, cell(launch, token | STOPPED))


@pytest.mark.parametrize(
    ("token", "stopping", "context_length", "reason", "stop_token_id"),
    [
        (1, StoppingParams(10), 64, FinishReason.END_OF_SEQUENCE, 1),
        (50, StoppingParams(10, stop_token_ids=(50,)), 64, FinishReason.STOP, 50),
        (1, StoppingParams(10, stop_token_ids=(1,), ignore_eos=True), 64, FinishReason.STOP, 1),
        (42, StoppingParams(1), 64, FinishReason.LENGTH, -1),
        (42, StoppingParams(10), 3, FinishReason.CONTEXT_LENGTH, -1),
    ],
)
def test_why_a_row_ends(
    token: int, stopping: StoppingParams, context_length: int, reason: FinishReason, stop_token_id: int
) -> None:
    scheduler, launch = one_row(stopping, context_length)
    (ending,) = scheduler.commits.commit(launch, cell(launch, token | STOPPED)).endings
    assert (ending.reason, ending.stop_token_id) == (reason, stop_token_id)
    assert scheduler.tally.finished == {reason.name: 1}
    assert scheduler.holdings.by_slot == [None, None]


def test_a_row_that_is_not_finite_ends_without_a_token() -> None:
    scheduler, launch = one_row(StoppingParams(10))
    commit = scheduler.commits.commit(launch, cell(launch, 42 | STOPPED | NON_FINITE))
    assert [ending.reason for ending in commit.endings] == [FinishReason.NON_FINITE]
    assert commit.tokens.size == commit.handles.size == commit.cells.size == 0
    assert scheduler.tally.counters["generated_tokens"] == 0
    assert scheduler.rows.committed_len[0] == 2


def test_a_token_of_a_row_that_has_ended_is_void_and_counted() -> None:
    scheduler, launch = one_row(StoppingParams(10))
    request = scheduler.holdings.by_slot[0]
    assert request is not None
    scheduler.stop(request, FinishReason.ABORTED)
    commit = scheduler.commits.commit(launch, cell(launch, 42))
    assert commit.tokens.size == 0
    assert scheduler.tally.counters["void_rows"] == 1
    assert scheduler.tally.counters["generated_tokens"] == 0
