"""What grammars force, proposed by the kernels as on the CPU, beside guesses and rows that are held."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.device import Form  # noqa: E402
from runahead.runtime.drafters.ngram import NO_DRAFT  # noqa: E402
from runahead.runtime.programs.cpu.rows import HostRows  # noqa: E402
from runahead.runtime.row_record import PENALTY_TENSORS, ROW_TENSORS  # noqa: E402
from tests.runtime.kernels.device_twin import compare_lines  # noqa: E402
from tests.runtime.kernels.masked_rows import EPOCHS, device_rows, give_grammars, rows_with_masks  # noqa: E402
from tests.runtime.kernels.test_triton_runs import (  # noqa: E402
    BLOCK_SIZE,
    CONTEXT,
    MOST,
    ROWS,
    STALE,
    compare_states,
    fill,
    give_states,
    history_of,
    random_specs,
)  # fmt: skip

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def forced_rows(seed: int, guesses: bool, snapshot_tokens: int = 0) -> tuple[HostRows, int]:
    """Rows that decode, some held, and what their grammars force: right, of another row, of a position behind, or
    ahead of the row's, where it went on otherwise, half written. The most drafts of the launch."""
    random, vocab = np.random.default_rng(seed), 30
    host = rows_with_masks(0, vocab, guesses=guesses, snapshot_tokens=snapshot_tokens)
    other = rows_with_masks(0, vocab, snapshot_tokens=snapshot_tokens)
    fill(other, random_specs(random, vocab, Form.PLAIN), random)
    for name in (*ROW_TENSORS, *PENALTY_TENSORS):
        getattr(host, name)[:] = getattr(other, name)
    host.rows, host.samples = other.rows, other.samples
    known = history_of(other)
    known[:] = random.integers(0, (2, 5)[seed % 2], (ROWS + 1, CONTEXT))
    host.last_token[:] = known[np.arange(ROWS + 1), host.seq_len - 1]
    if guesses:
        history_of(host)[:] = known
    give_grammars(host, random)
    host.mask_epoch[0] = EPOCHS if seed % 2 else 0
    host.forced[:] = False
    host.held[:ROWS] = host.alive[:ROWS] & (host.mask_epoch[:ROWS] != 0) & (random.random(ROWS) < 0.25)
    host.drafted[:ROWS] = random.integers(0, MOST + 1, ROWS)
    host.proposed[:] = random.integers(0, vocab, host.proposed.shape)
    host.proposed[np.arange(MOST) >= host.drafted[:, None]] = NO_DRAFT
    host.forced[:ROWS] = host.drafted[:ROWS] > 0
    memory = host.masks
    assert memory is not None
    for slot in range(ROWS):
        ahead, size = int(random.integers(-1, 4)), int(random.integers(1, memory.most_forced + 1))
        tokens = random.integers(0, vocab, size).astype(np.int32)
        if 0 < ahead <= size and random.random() < 0.8:
            tokens[ahead - 1] = host.last_token[slot]
        epoch = int(host.mask_epoch[slot]) - int(random.random() < 0.1)
        memory.write_forced(slot, epoch, int(host.seq_len[slot]) - ahead, tokens.tolist())
        if random.random() < 0.1:
            memory.forced[slot, -1] ^= 1 << 40
    count = (1, 3, 7)[seed % 3]
    host.most_drafts, host.most_guesses = count, min(count, (0, 1, 7)[seed // 3 % 3]) if guesses else 0
    return host, count


@pytest.mark.parametrize("guesses", [True, False])
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(one, marks=pytest.mark.large) for one in range(6, 60))])
def test_what_grammars_force_is_drafted_as_on_the_cpu(seed: int, guesses: bool) -> None:
    host, count = forced_rows(seed, guesses)
    device = device_rows(host, 5)
    drafts, padding = device.drafts, seed % (ROWS - host.rows.size + 1)
    assert drafts is not None
    for name in ("token_ids", "positions", "slot_mapping", "token_lens", "seq_lens", "verify_slots", "verify_logits"):
        getattr(drafts, name).fill_(STALE)
    drafts.guesses.fill_(host.most_guesses)
    host.draft()
    device.draft(host.rows.size + padding, count)
    compare_lines(host, device, count, padding)


@pytest.mark.parametrize("guesses", [True, False])
def test_rows_in_slots_that_keep_no_runs_have_no_drafts_and_all_logits_have_places_of_their_own(guesses: bool) -> None:
    host, count = forced_rows(5, guesses)
    host.rows, host.samples = np.arange(ROWS), np.ones(ROWS, np.bool_)
    host.alive[:ROWS], host.held[:] = True, False
    device, kept = device_rows(host, 5, kept=4), 4
    drafts = device.drafts
    assert drafts is not None
    drafts.guesses.fill_(host.most_guesses)
    host.draft()
    assert host.drafted[:kept].any() and host.drafted[kept:].any()
    host.drafted[kept:], host.proposed[kept:] = 0, NO_DRAFT
    device.draft(ROWS, count)
    compare_lines(host, device, count, 0)
    places = drafts.logits_slots[: ROWS + int(host.drafted.sum())].tolist()
    assert len(set(places)) == len(places) and max(places) < ROWS + 1 + count * kept


@pytest.mark.parametrize("seed", range(6))
def test_the_states_of_rows_that_are_held_stay_as_they_are_with_what_is_kept_of_their_runs(seed: int) -> None:
    """Beside others, whose states go on by what S has kept of their runs: as on the CPU."""
    host, count = forced_rows(seed, True, snapshot_tokens=BLOCK_SIZE)
    random = np.random.default_rng(seed)
    host.rows, host.samples = random.permutation(ROWS), np.ones(ROWS, np.bool_)
    host.alive[:ROWS] = True
    host.held[:ROWS] = np.arange(ROWS) % 3 == seed % 3
    give_states(host, random)
    before = host.state_len.copy()
    device = device_rows(host, 5, keeps_states=True)
    assert device.drafts is not None
    device.row_states.lengths.copy_(torch.from_numpy(host.state_len))
    device.drafts.guesses.fill_(host.most_guesses)
    host.draft()
    device.draft(ROWS, count)
    compare_lines(host, device, count, 0)
    found = compare_states(host, device, ROWS, count)
    held = host.held[:ROWS]
    assert host.drafted[:ROWS][held].any() and found.replayed.any()
    assert (host.state_len[:ROWS] == before[:ROWS])[held].all() and (host.state_len[:ROWS] > before[:ROWS])[~held].all()


def test_every_kind_of_proposal_was_seen() -> None:
    seen = Counter[str]()
    for seed in range(6):
        host, count = forced_rows(seed, True)
        held = host.held.copy()
        host.draft()
        for slot in host.rows.tolist():
            seen["held with drafts"] += bool(held[slot] and host.drafted[slot])
            seen["forced"] += bool(not held[slot] and host.forced[slot] and host.drafted[slot])
            seen["as many as there may be"] += bool(
                host.forced[slot] and not held[slot] and host.drafted[slot] == count
            )
            seen["guessed beside a grammar"] += bool(
                not held[slot] and host.mask_epoch[slot] and host.drafted[slot] and not host.forced[slot]
            )
            seen["nothing"] += bool(host.alive[slot] and not host.drafted[slot])
    assert len(seen) == 5 and min(seen.values()) > 0, seen


def test_a_plain_launch_leaves_no_drafts_to_a_row_that_is_held_behind_it() -> None:
    """A row's drafts of some launches ago are not those of the F that it is held behind; a row that was held before
    that F keeps its own."""
    host, _ = forced_rows(1, True)
    host.rows, host.samples = np.arange(ROWS), np.ones(ROWS, np.bool_)
    host.held[:ROWS] = np.arange(ROWS) % 2 == 1
    host.alive[:ROWS] = True
    host.drafted[:ROWS] = 2
    device = device_rows(host, 5)
    assert device.drafts is not None
    device.prepare_queries(ROWS, ROWS, is_decode=True)
    host.most_drafts = host.most_guesses = 0
    host.draft()
    assert device.drafts.drafted[:ROWS].tolist() == host.drafted[:ROWS].tolist() == [0, 2, 0, 2, 0, 2]
