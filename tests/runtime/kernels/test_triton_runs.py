"""Drafts by the kernels against the CPU's functions: S that verifies runs, the drafter, and the lines of F."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.device import Form  # noqa: E402
from runahead.cuda_graphs.rings import NON_FINITE, STOPPED, VOID, RingLayout, allocate_rings  # noqa: E402
from runahead.runtime.drafters.ngram import NO_DRAFT, NgramDrafter  # noqa: E402
from runahead.runtime.kernels.row_state import PenaltyState, RowState  # noqa: E402
from runahead.runtime.kernels.triton.row_state.drafts import make_draft_state  # noqa: E402
from runahead.runtime.kernels.triton.row_updates.rows import DeviceRows  # noqa: E402
from runahead.runtime.kernels.triton.sampling.sampler import VerifiedTokens, make_sampler_buffers, sample_rows_cuda  # noqa: E402
from runahead.runtime.programs.cpu.inputs import NOWHERE, Queries, StateSlots, state_slots_of  # noqa: E402
from runahead.runtime.programs.cpu.rows import HostRows  # noqa: E402
from runahead.runtime.programs.cpu.sampler import HostSampler  # noqa: E402
from runahead.runtime.row_record import PENALTY_TENSORS, ROW_TENSORS  # noqa: E402
from runahead.runtime.wire.parameters import MAX_BIAS, MAX_STOP_IDS  # noqa: E402
from tests.runtime.kernels.device_twin import mapped_rings  # noqa: E402
from tests.runtime.kernels.sampling_oracle import RowSpec, penalties_of, random_spec, state_of  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

ROWS, BLOCK_SIZE, CONTEXT, MOST, TOP = 6, 8, 128, 7, 20
VOCAB = 2100  # two tiles of the sampler
STALE = -77
VERIFIES = ((1, 1), (2, 3), (3, 7), (4, 7), (5, 5), (6, 7))  # seeds, and drafts of a row at most


class GuessingRows(HostRows):
    """Host rows whose drafts are most often right, as it turns out while they are verified."""

    def __init__(self, random: np.random.Generator, vocab_size: int, number: int, *, snapshot_tokens: int = 0) -> None:
        layout = RingLayout(slots=4, plan_words=16, bulk_words=16, rows=ROWS, max_top=TOP, drafts=MOST)
        super().__init__(
            allocate_rings(layout), ROWS, CONTEXT // BLOCK_SIZE, vocab_size, BLOCK_SIZE, MAX_STOP_IDS, MAX_BIAS,
            penalty_slots=ROWS, launched=number, drafter=NgramDrafter(ROWS, CONTEXT),
            snapshot_tokens=snapshot_tokens,
        )  # fmt: skip
        self._random = random

    def goes_on(self, slots: NDArray[np.int64], tokens: NDArray[np.int32], offset: int) -> NDArray[np.bool_]:
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if offset < self.drafted[slot] and self._random.random() < 0.9:
                self.proposed[slot, offset] = token
        return super().goes_on(slots, tokens, offset)


def device_rows(host: HostRows, launched: int, keeps_states: bool = False) -> DeviceRows:
    """Rows of the kernels that hold what these rows do; poison in what they are going to leave."""
    slots, vocab = host.alive.size, host.vocab_size
    drafts = make_draft_state(slots, CONTEXT, host.max_blocks, ROWS, MOST, DEVICE)
    rings = mapped_rings(host.rings.layout, DEVICE)
    device = DeviceRows(
        rings, max_rows=slots - 1, max_tokens=ROWS, block_size=BLOCK_SIZE, context_length=CONTEXT, vocab_size=vocab,
        device=DEVICE, penalty_slots=len(host.counts) - 1, drafts=drafts, keeps_states=keeps_states,
        snapshot_tokens=host.snapshot_tokens,
    )  # fmt: skip
    device.reset(launched)
    for name in ROW_TENSORS:
        getattr(device.state, name).copy_(torch.from_numpy(getattr(host, name)))
    for name in PENALTY_TENSORS:
        getattr(device.penalties, name).copy_(torch.from_numpy(getattr(host, name)))
    drafts.history.copy_(torch.from_numpy(history_of(host)))
    listed = np.full(device.rows.slots.shape[0], slots - 1, np.int32)
    listed[: host.rows.size] = host.rows
    device.rows.slots.copy_(torch.from_numpy(listed))
    device.rows.sample_slots.copy_(torch.from_numpy(listed))
    for array in (rings.cells, rings.logprob, rings.top_ids, rings.top_logprobs, rings.drafted):
        array[:] = STALE
    return device


def history_of(host: HostRows) -> NDArray[np.int32]:
    assert host.drafter is not None
    history = host.drafter.memory()["history"]
    assert history.dtype == np.int32
    return history.view(np.int32)


def fill(host: HostRows, specs: list[RowSpec], random: np.random.Generator) -> None:
    """The rows of `specs` in slots 0, 1, ...; the list names them in another order, if not all."""
    state, penalties = state_of(specs, host.vocab_size), penalties_of(specs, host.vocab_size)
    for name in ROW_TENSORS:
        if name != "block_table":
            getattr(host, name)[:] = getattr(state, name).numpy()
    for name in PENALTY_TENSORS:
        getattr(host, name)[:] = getattr(penalties, name).numpy()
    host.rows = random.permutation(ROWS)[: random.integers(1, ROWS + 1)].astype(np.int64)
    host.samples = np.ones(host.rows.size, np.bool_)
    host.block_table[:] = random.integers(1, 500, host.block_table.shape)
    history_of(host)[:] = random.integers(0, 5, (ROWS + 1, CONTEXT))
    host.last_token[:] = history_of(host)[np.arange(ROWS + 1), host.seq_len - 1]
    host.max_position[:ROWS] = np.minimum(host.seq_len[:ROWS] + random.integers(0, 12, ROWS), CONTEXT - 1)


def random_specs(random: np.random.Generator, vocab_size: int, form: Form) -> list[RowSpec]:
    specs: list[RowSpec] = []
    for _ in range(ROWS):
        spec = dataclasses.replace(
            random_spec(random, vocab_size),
            position=int(random.integers(1, CONTEXT - MOST - 2)),
            alive=bool(random.random() < 0.9),
        )
        if form is Form.PLAIN:
            spec = RowSpec(
                temperature=spec.temperature, seed=spec.seed, position=spec.position, alive=spec.alive,
                stop_ids=spec.stop_ids,
            )  # fmt: skip
        elif spec.min_position:  # a run may go beyond it
            spec = dataclasses.replace(spec, min_position=spec.position + int(random.integers(0, 5)))
        elif len(specs) % 3 == 1:  # what it has said changes what it says next
            spec = dataclasses.replace(spec, temperature=0.0, frequency=6.0, presence=2.0, allowed=None)
        specs.append(spec)
    return specs


def runs_to_verify(
    seed: int, count: int, form: Form, number: int
) -> tuple[GuessingRows, NDArray[np.float32], np.random.Generator]:
    """Rows with drafts, of any kind that this form samples, and the logits that F has left for them, by row slot."""
    random = np.random.default_rng(seed)
    host = GuessingRows(random, VOCAB, number - 1)
    fill(host, random_specs(random, VOCAB, form), random)
    host.drafted[:ROWS] = random.integers(0, count + 1, ROWS)
    host.drafted[~host.alive] = 0
    host.proposed[:] = random.integers(0, VOCAB, host.proposed.shape)
    host.proposed[np.arange(MOST) >= host.drafted[:, None]] = NO_DRAFT
    logits = (random.normal(size=(ROWS + 1, 1 + MOST, VOCAB)) * 3).astype(np.float32)
    likely = np.array([0, 1, 2, 7], np.int64)  # the same few tokens again and again: penalties count them
    logits[:, :, likely] = 14 + logits[:, :, likely] / 6
    for slot in range(ROWS):
        host.stop_ids[slot, 0] = likely[slot % 2] if slot % 3 == 0 else -1
        host.stop_count[slot] = max(1, host.stop_count[slot])
    logits[random.integers(ROWS), random.integers(1, 3), 5] = np.nan
    return host, logits, random


def verify_on_the_cpu(host: GuessingRows, logits: NDArray[np.float32], count: int) -> None:
    """Token after token: the definition."""
    host.begin()
    state = RowState(**{name: torch.from_numpy(getattr(host, name)) for name in ROW_TENSORS})
    penalties = PenaltyState(torch.from_numpy(host.counts), torch.from_numpy(host.in_prompt))
    HostSampler(host, logits, state, penalties).sample(*host.to_sample(), Form.FULL, count)


@pytest.mark.parametrize(("seed", "count"), VERIFIES)
@pytest.mark.parametrize("form", list(Form))
def test_a_run_is_verified_as_on_the_cpu(form: Form, seed: int, count: int) -> None:
    number = 1000 * seed
    host, logits, random = runs_to_verify(seed, count, form, number)
    device = device_rows(host, number - 1)
    verify_on_the_cpu(host, logits, count)
    drafts = device.drafts
    assert drafts is not None
    drafts.proposed.copy_(torch.from_numpy(host.proposed))
    drafts.drafted.copy_(torch.from_numpy(host.drafted))
    padding = int(random.integers(0, ROWS - host.rows.size + 1))  # of a captured bucket
    rows, width = host.rows.size + padding, 1 + count
    verify_slots = np.full((rows, width), ROWS, np.int32)
    verify_logits = np.zeros((rows, width), np.int32)
    for place, slot in enumerate(host.rows.tolist()):
        mine = np.arange(1 + host.drafted[slot])
        verify_slots[place, mine], verify_logits[place, mine] = slot, slot * (1 + MOST) + mine
    buffers = make_sampler_buffers(ROWS * (1 + MOST), VOCAB, TOP, DEVICE)
    found = sample_rows_cuda(
        torch.from_numpy(logits).to(DEVICE).view(-1, VOCAB),
        device.state,
        device.penalties,
        torch.from_numpy(verify_slots.reshape(-1)).to(DEVICE),
        form,
        buffers,
        torch.from_numpy(verify_logits.reshape(-1)).to(DEVICE),
        VerifiedTokens(width, drafts.proposed),
    )
    device.advance(rows, found, count)

    rings, ring = device_rings(device), host.rings.slot(number)
    cells = host.rings.cells[ring, : host.rows.size, :width]
    assert rings["cells"][ring, : host.rows.size, :width].tolist() == cells.tolist()
    assert (rings["cells"][ring, host.rows.size :] == STALE).all()
    assert (rings["cells"][ring, :, width:] == STALE).all()
    assert rings["drafted"][ring, : host.rows.size].tolist() == host.drafted[host.rows].tolist()
    assert rings["drafted"][ring, : host.rows.size].tolist() == host.rings.drafted[ring, : host.rows.size].tolist()
    read = device.read()
    for name in (*ROW_TENSORS, *PENALTY_TENSORS):
        assert np.array_equal(read[name], getattr(host, name)), name
    assert np.array_equal(read["history"], history_of(host))
    low = cells.astype(np.int64) & 0xFFFFFFFF
    kept = (low & VOID) == 0
    if form is Form.FULL:
        compare_logprobs(host, rings, ring, kept)


def compare_logprobs(host: HostRows, rings: dict[str, NDArray[np.generic]], ring: int, kept: NDArray[np.bool_]) -> None:
    for place, slot in enumerate(host.rows.tolist()):
        asked = int(host.logprobs[slot])
        for offset in range(1 + MOST):
            found = rings["logprob"][ring, place, offset]
            ids = rings["top_ids"][ring, place, offset]
            top = rings["top_logprobs"][ring, place, offset]
            if asked < 0 or offset >= kept.shape[1] or not kept[place, offset]:
                assert found == STALE and (ids == STALE).all() and (top == STALE).all()
                continue
            np.testing.assert_allclose(found, host.rings.logprob[ring, place, offset], atol=1e-6, rtol=1e-6)
            assert ids[:asked].tolist() == host.rings.top_ids[ring, place, offset, :asked].tolist()
            expected = host.rings.top_logprobs[ring, place, offset, :asked]
            np.testing.assert_allclose(top[:asked], expected, atol=1e-6, rtol=1e-6)
            assert (ids[asked:] == STALE).all()


def device_rings(device: DeviceRows) -> dict[str, NDArray[np.generic]]:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return {name: tensor.numpy() for name, tensor in device._results._asdict().items()}


def test_every_way_in_which_a_run_ends_was_seen() -> None:
    """By the seeds above: what the kernels are compared on is not poorer than it looks."""
    seen = {"three drafts right": 0, "stopped inside": 0, "not finite inside": 0, "kept whole": 0, "void": 0}
    for seed, count in VERIFIES:
        host, logits, _ = runs_to_verify(seed, count, Form.FULL, 1)
        verify_on_the_cpu(host, logits, count)
        cells = host.rings.cells[host.rings.slot(1), : host.rows.size, : 1 + count]
        inside = cells[:, 1:]
        seen["stopped inside"] += int(np.count_nonzero((inside & STOPPED) * ((inside & VOID) == 0)))
        seen["not finite inside"] += int(np.count_nonzero(inside & NON_FINITE))
        whole = ((cells & VOID) == 0).sum(axis=1) == 1 + host.drafted[host.rows]
        seen["kept whole"] += int(np.count_nonzero(whole & (host.drafted[host.rows] > 0)))
        seen["three drafts right"] += int(np.count_nonzero((((cells & VOID) == 0).sum(axis=1)) > 3))
        seen["void"] += int(np.count_nonzero(cells[:, 0] & VOID))
    assert all(seen.values()), seen


@pytest.mark.parametrize("seed", range(6))
def test_drafts_and_the_lines_of_f_are_those_of_the_cpu(seed: int) -> None:
    random = np.random.default_rng(100 + seed)
    host = GuessingRows(random, 30, 0)
    count = (1, 3, 7)[seed % 3]
    fill(host, random_specs(random, 30, Form.PLAIN), random)
    host.seq_len[:ROWS] = np.where(random.random(ROWS) < 0.2, random.integers(1, 4, ROWS), host.seq_len[:ROWS])
    history_of(host)[:] = random.integers(0, (2, 5)[seed % 2], (ROWS + 1, CONTEXT))
    host.last_token[:] = history_of(host)[np.arange(ROWS + 1), host.seq_len - 1]
    # A device may have been left with tokens of no vocabulary behind a row's length.
    behind = np.arange(CONTEXT) >= host.seq_len[:, None]
    history_of(host)[behind] = STALE
    host.max_position[:ROWS] = np.minimum(host.seq_len[:ROWS] + random.integers(0, 12, ROWS), CONTEXT - 1)
    device = device_rows(host, 5)
    drafts = device.drafts
    assert drafts is not None
    for name in ("token_ids", "positions", "slot_mapping", "token_lens", "seq_lens", "verify_slots", "verify_logits"):
        getattr(drafts, name).fill_(STALE)
    drafts.drafted.fill_(0)
    host.most_drafts = host.most_guesses = count
    host.draft()
    padding = int(random.integers(0, ROWS - host.rows.size + 1))
    rows = host.rows.size + padding
    device.draft(rows, count)
    expected: Queries = HostRows.queries(host)
    listed = host.rows
    assert drafts.drafted.cpu().numpy()[listed].tolist() == host.drafted[listed].tolist()
    assert drafts.proposed.cpu().numpy()[listed, :count].tolist() == host.proposed[listed, :count].tolist()
    assert host.drafted.sum() or seed == 1
    batch = device.verify_batch(rows, count)
    lines = expected.token_ids.size
    starts = expected.query_start_loc.tolist()
    assert batch.query_start_loc.tolist() == starts + [starts[-1] + 1 + i for i in range(padding)]
    assert batch.seq_lens.tolist() == expected.seq_lens.tolist() + [0] * padding
    alive = np.repeat(host.alive[listed], np.diff(expected.query_start_loc))
    assert batch.token_ids[:lines].tolist() == expected.token_ids.tolist()
    assert batch.positions.cpu().numpy()[:lines][alive].tolist() == expected.positions[alive].tolist()
    assert batch.slot_mapping.cpu().numpy()[:lines][alive].tolist() == expected.slot_mapping[alive].tolist()
    lens = drafts.token_lens.cpu().numpy()[: batch.num_tokens]
    assert lens[:lines][alive].tolist() == (expected.positions[alive] + 1).tolist()
    assert not lens[:lines][~alive].any() and not lens[lines:].any()
    spare = batch.token_ids[lines + padding :], batch.slot_mapping[lines + padding :] // BLOCK_SIZE
    assert not any(bool(one.any()) for one in spare), "lines of nobody write the null block"
    # Where the next S finds the logits: of every row that is listed, and of nobody else, however many rows it has.
    verify_slots = drafts.verify_slots.cpu().numpy()[: ROWS * (1 + count)]
    verify_logits = drafts.verify_logits.cpu().numpy()[: ROWS * (1 + count)]
    there = verify_slots != ROWS
    assert verify_slots[there].tolist() == np.repeat(listed, np.diff(expected.query_start_loc)).tolist()
    assert verify_logits[there].tolist() == list(range(lines))
    places = np.flatnonzero(there) // (1 + count)
    assert places.tolist() == np.repeat(np.arange(listed.size), np.diff(expected.query_start_loc)).tolist()
    tables = drafts.block_tables.cpu().numpy()
    of_line = np.repeat(np.arange(listed.size), np.diff(expected.query_start_loc))
    for line in np.flatnonzero(alive).tolist():
        place = of_line[line]
        used = -(-int(expected.positions[line] + 1) // BLOCK_SIZE)
        table = tables[line]
        assert table[:used].tolist() == host.block_table[listed[place], :used].tolist()


def give_states(host: HostRows, random: np.random.Generator) -> None:
    """To rows that have begun long ago, each in a slot of its own: states that lack some tokens of a run, and places
    for snapshots at some of the borders."""
    host.seq_len[:ROWS] = np.maximum(host.seq_len[:ROWS], MOST + 2)
    borders = host.block_table[:, host.max_blocks :]
    borders[:] = random.integers(0, 3, borders.shape)  # 0: the border has no snapshot
    host.state_slot[:ROWS] = random.permutation(ROWS)
    host.begins_as[:ROWS] = 2  # behind other blocks
    host.state_len[:] = np.maximum(host.seq_len - 1 - random.integers(0, MOST + 1, ROWS + 1), 0)


def compare_states(host: HostRows, device: DeviceRows, rows: int, count: int) -> StateSlots:
    """The states that the rows of an F with drafts go on with, and what they stand for behind it, are the CPU's, which
    has drafted too. rows: of a captured bucket. Returns the CPU's."""
    queries: Queries = HostRows.queries(host)
    expected, batch, live = state_slots_of(host, queries), device.verify_batch(rows, count), queries.seq_lens > 0
    names = {"state_slots": "slots", "states_read_from": "read_from", "replayed": "replayed"}
    for name, of_host in names.items():
        found = getattr(batch, name).cpu().numpy()[: host.rows.size]
        assert found[live].tolist() == getattr(expected, of_host)[live].tolist(), name
    copied = live & (expected.copied_to != NOWHERE)
    assert batch.states_copied_to is not None and batch.copied_after is not None
    assert batch.states_copied_to.cpu().numpy()[: live.size][live].tolist() == expected.copied_to[live].tolist()
    assert batch.copied_after.cpu().numpy()[: live.size][copied].tolist() == expected.copied_after[copied].tolist()
    host.leave_states(queries.slots, expected.lengths)
    assert device.row_states.lengths.tolist() == host.state_len.tolist()
    return expected


@pytest.mark.parametrize("seed", range(4))
def test_the_states_that_rows_with_drafts_go_on_with_are_those_of_the_cpu(seed: int) -> None:
    """What is replayed of each row, borders inside that, behind it and none, places without a snapshot; and what the
    states stand for afterwards, which of rows that have ended stays."""
    random = np.random.default_rng(200 + seed)
    host = GuessingRows(random, 30, 0, snapshot_tokens=(BLOCK_SIZE, 2 * BLOCK_SIZE)[seed % 2])
    fill(host, random_specs(random, 30, Form.PLAIN), random)
    host.rows = random.permutation(ROWS)[: ROWS - seed % 2].astype(np.int64)
    host.samples = np.ones(host.rows.size, np.bool_)
    host.alive[host.rows] = np.arange(host.rows.size) > 0  # one has ended
    give_states(host, random)
    device = device_rows(host, 5, keeps_states=True)
    device.row_states.lengths.copy_(torch.from_numpy(host.state_len))
    host.most_drafts = host.most_guesses = 3
    host.draft()
    device.draft(ROWS, 3)
    found = compare_states(host, device, ROWS, 3)
    assert found.replayed.any() and (found.copied_to != NOWHERE).any()
