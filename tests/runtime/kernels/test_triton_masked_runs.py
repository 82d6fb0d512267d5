"""Rows with a grammar and drafts by the kernels, against the CPU's functions: masks along runs, what grammars force,
and runs that are held."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.device import Form  # noqa: E402
from runahead.cuda_graphs.rings import HELD, NON_FINITE, NOTHING_LEFT, STOPPED, VOID  # noqa: E402
from runahead.runtime.drafters.ngram import NO_DRAFT  # noqa: E402
from runahead.runtime.kernels.row_state import PenaltyState, RowState  # noqa: E402
from runahead.runtime.kernels.triton.row_updates.rows import DeviceRows  # noqa: E402
from runahead.runtime.kernels.triton.sampling.sampler import VerifiedTokens, make_sampler_buffers, sample_rows_cuda  # noqa: E402
from runahead.runtime.masks.mask_memory import RUN  # noqa: E402
from runahead.runtime.programs.cpu.rows import HostRows  # noqa: E402
from runahead.runtime.programs.cpu.sampler import HostSampler  # noqa: E402
from runahead.runtime.row_record import (  # noqa: E402
    PENALTY_TENSORS,
    ROW_TENSORS,
    token_mask,
)
from tests.runtime.kernels.device_twin import compare_drafts, compare_lines  # noqa: E402
from tests.runtime.kernels.masked_rows import device_rows, give_grammars, rows_with_masks  # noqa: E402
from tests.runtime.kernels.test_triton_runs import (  # noqa: E402
    MOST,
    ROWS,
    STALE,
    TOP,
    VOCAB,
    compare_logprobs,
    device_rings,
    fill,
    history_of,
    random_specs,
)  # fmt: skip
from tests.runtime.masks.one_row import write_mask  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

VERIFIES = (
    (1, 3),
    (2, 7),
    (3, 7),
    (4, 1),
    (5, 5),
    (6, 7),
    (7, 7),
    (8, 3),
)  # seeds, and drafts of a row that S looks at, at most
MORE = tuple((seed, (7, 3, 1, 5)[seed % 4]) for seed in range(9, 60))


def write_masks(host: HostRows, random: np.random.Generator, seen: Counter[str]) -> None:
    """Of each row with a grammar the masks along its drafts, up to a line that is not there: another row's, another
    position's, behind other drafts, half written, or never written."""
    memory, vocab = host.masks, host.vocab_size
    assert memory is not None
    for slot in np.flatnonzero(host.mask_epoch).tolist():
        epoch, position = int(host.mask_epoch[slot]), int(host.seq_len[slot])
        spoilt = int(random.integers(-1, 1 + 2 * (1 + host.drafted[slot])))
        for count in range(1 + int(host.drafted[slot])):
            run = host.proposed[slot, :count].copy()
            some = random.permutation(vocab)[: (vocab // 2, 6, 1, 3)[int(random.integers(4))]].tolist()
            if count < host.drafted[slot]:
                some.append(int(host.proposed[slot, count]))
            if slot == 4 and count == 1:
                some = []
                seen["nothing is left behind a draft"] += 1
            kind = int(random.integers(6)) if count == spoilt else -1
            seen[f"a line of kind {kind}"] += 1
            match kind:
                case 0:
                    epoch_of, at = epoch - 1, position  # the row that had the slot before was as long
                case 1:
                    epoch_of, at = epoch, position - 1
                case _:
                    epoch_of, at = epoch, position
            if kind == 2 and count:
                run[int(random.integers(count))] ^= 1
            if kind != 3:
                write_mask(memory, slot, epoch_of, at, token_mask(some, vocab), run)
            if kind == 4:
                memory.lines[slot, count, -1] ^= 1 << int(random.integers(60))
            if kind == 5:
                memory.lines[slot, count, RUN] += 1


def masked_runs(seed: int, count: int, number: int) -> tuple[HostRows, NDArray[np.float32], Counter[str]]:
    """Rows with drafts, two of three with a grammar, and the logits that F has left for them, by row slot."""
    random, seen = np.random.default_rng(seed), Counter[str]()
    host = rows_with_masks(number - 1, VOCAB)
    fill(host, random_specs(random, VOCAB, Form.FULL), random)
    give_grammars(host, random)
    host.drafted[:ROWS] = random.integers(0, count + 1, ROWS)
    host.drafted[~host.alive] = 0
    likely = np.array([0, 1, 2, 7], np.int32)  # the same few tokens again and again: penalties count them
    host.proposed[:] = likely[random.integers(0, 4, host.proposed.shape)]
    host.proposed[np.arange(MOST) >= host.drafted[:, None]] = NO_DRAFT
    logits = (random.normal(size=(ROWS + 1, 1 + MOST, VOCAB)) * 3).astype(np.float32)
    for slot in range(ROWS):
        for at in range(int(host.drafted[slot])):
            if random.random() < 0.9:
                logits[slot, at, host.proposed[slot, at]] += 60  # most often it is what is sampled
        host.stop_ids[slot, 0] = likely[slot % 2] if random.random() < 0.3 else -1
        host.stop_count[slot] = max(1, host.stop_count[slot])
    logits[random.integers(ROWS), random.integers(1, 3), 5] = np.nan
    write_masks(host, random, seen)
    return host, logits, seen


def by_slot(logits: NDArray[np.float32]) -> torch.Tensor:
    """Logits [slots, 1 + K, vocab] as kernels have them where rows may be held: token after token."""
    return torch.from_numpy(np.ascontiguousarray(logits.transpose(1, 0, 2)).reshape(-1, logits.shape[2])).to(DEVICE)


def point_at_runs(device: DeviceRows, host: HostRows, count: int) -> None:
    """Where S finds the logits of each row's run, as the F before it has left that."""
    drafts = device.drafts
    assert drafts is not None
    entries = np.arange(1 + count) <= host.drafted[host.rows][:, None]
    slots = np.where(entries, host.rows[:, None], ROWS)
    lines = np.where(entries, np.arange(1 + count) * (ROWS + 1) + host.rows[:, None], 0)
    for held, found in ((drafts.verify_slots, slots), (drafts.verify_logits, lines)):
        held[: found.size] = torch.from_numpy(found.reshape(-1).astype(np.int32)).to(DEVICE)


def verified(device: DeviceRows, rows: int, count: int, logits: torch.Tensor) -> None:
    """S by the kernels, as `TritonProgram` enqueues it; what the worker writes behind the look is for the next S."""
    drafts, masks, width = device.drafts, device.masks, 1 + count
    assert drafts is not None and masks is not None
    device.judge(rows, count)
    kept = masks.lines.clone()
    masks.lines.fill_(-1)
    buffers = make_sampler_buffers(ROWS * (1 + MOST), VOCAB, TOP, DEVICE)
    for left in (buffers.tokens, buffers.lowest_allowed, buffers.edited_arg):
        left.fill_(5)
    buffers.nothing_left.fill_(True)
    found = sample_rows_cuda(
        logits, device.state, device.penalties, drafts.verify_slots[: rows * width], Form.FULL, buffers,
        drafts.verify_logits[: rows * width], VerifiedTokens(width, drafts.proposed), masks,
    )  # fmt: skip
    device.advance(rows, found, count)
    masks.lines.copy_(kept)


def on_the_cpu(host: HostRows, logits: NDArray[np.float32], count: int) -> None:
    host.begin()
    state = RowState(**{name: torch.from_numpy(getattr(host, name)) for name in ROW_TENSORS})
    penalties = PenaltyState(torch.from_numpy(host.counts), torch.from_numpy(host.in_prompt))
    HostSampler(host, logits, state, penalties).sample(*host.to_sample(), Form.FULL, count)


def compared(host: HostRows, device: DeviceRows, count: int) -> NDArray[np.int64]:
    """All that this S has left is what the CPU has left. Returns the cells."""
    rings, ring, listed = device_rings(device), host.rings.slot(host.number), host.rows
    cells: NDArray[np.int64] = host.rings.cells[ring, : listed.size, : 1 + count]
    assert rings["cells"][ring, : listed.size, : 1 + count].tolist() == cells.tolist()
    assert (rings["cells"][ring, listed.size :] == STALE).all() and (
        rings["cells"][ring, :, 1 + count :] == STALE
    ).all()
    assert rings["drafted"][ring, : listed.size].tolist() == host.rings.drafted[ring, : listed.size].tolist()
    assert device.masks is not None
    assert device.masks.held.cpu().numpy()[listed].tolist() == host.held[listed].tolist()
    compare_drafts(host, device, listed)
    read = device.read()
    for name in (*ROW_TENSORS, *PENALTY_TENSORS):
        assert np.array_equal(read[name], getattr(host, name)), name
    assert np.array_equal(read["history"], history_of(host))
    compare_logprobs(host, rings, ring, (cells & (VOID | HELD)) == 0)
    return cells


@pytest.mark.parametrize(("seed", "count"), [*VERIFIES, *(pytest.param(*one, marks=pytest.mark.large) for one in MORE)])
def test_a_run_is_verified_under_its_masks_as_on_the_cpu(seed: int, count: int) -> None:
    host, logits, _ = masked_runs(seed, count, 1000 * seed)
    device, before = device_rows(host, 1000 * seed - 1), host.drafted.copy()
    point_at_runs(device, host, count)
    on_the_cpu(host, logits, count)
    verified(device, host.rows.size, count, by_slot(logits))
    compared(host, device, count)
    held = [slot for slot in host.rows.tolist() if host.held[slot]]
    assert host.drafted[held].tolist() == before[held].tolist(), "a row that is held keeps its drafts"


def test_every_kind_of_line_and_every_end_of_a_run_was_seen() -> None:
    """By the seeds above: what the kernels are compared on is not poorer than it looks."""
    seen = Counter[str]()
    for seed, count in VERIFIES:
        host, logits, lines = masked_runs(seed, count, 1)
        before = host.drafted.copy()
        on_the_cpu(host, logits, count)
        cells = host.rings.cells[host.rings.slot(1), : host.rows.size, : 1 + count]
        there = (cells & (VOID | HELD)) == 0
        ruled = (host.mask_epoch[host.rows] != 0)[:, None]
        seen["held"] += int(np.count_nonzero(cells[:, 0] & HELD))
        seen["held with drafts"] += int(np.count_nonzero(host.held[host.rows] & (before[host.rows] > 0)))
        seen["nothing left inside"] += int(np.count_nonzero(there[:, 1:] & ((cells[:, 1:] & NOTHING_LEFT) != 0)))
        seen["stopped inside"] += int(np.count_nonzero(there[:, 1:] & ruled & ((cells[:, 1:] & STOPPED) != 0)))
        seen["not finite"] += int(np.count_nonzero(there & ((cells & NON_FINITE) != 0)))
        seen["kept drafts"] += int(np.count_nonzero(there[:, 1:] & ruled))
        cut = (host.drafted < before)[host.rows] & ~host.held[host.rows]
        seen["cut where no mask is"] += int(np.count_nonzero(cut))
        seen["plain rows with drafts"] += int(np.count_nonzero(there[:, 1:] & ~ruled))
        seen += lines
    wanted = {f"a line of kind {kind}" for kind in range(-1, 6)} | {
        "held", "held with drafts", "nothing left inside", "stopped inside", "kept drafts", "cut where no mask is",
        "plain rows with drafts", "nothing is left behind a draft",
    }  # fmt: skip
    assert not [what for what in wanted if not seen[what]], seen


def test_a_run_that_is_held_is_taken_later_from_where_it_was_left() -> None:
    """Its drafts, logits and masks are those of the F that had it, whatever place the row has in between, and however
    many drafts launches have."""
    number, count = 50, 7
    host, logits, _ = masked_runs(3, count, number)
    host.rows = np.arange(ROWS)
    host.samples = np.ones(ROWS, np.bool_)
    host.alive[:ROWS] = True
    host.drafted[1:3] = 3
    host.proposed[1:3, :3] = [[0, 1, 2], [7, 7, 0]]
    host.proposed[1:3, 3:] = NO_DRAFT
    logits[:] = np.where(np.isnan(logits), 0, logits)
    memory = host.masks
    assert memory is not None
    memory.lines[:] = 0
    device = device_rows(host, number - 1)
    point_at_runs(device, host, count)
    device_logits = by_slot(logits)
    on_the_cpu(host, logits, count)
    verified(device, ROWS, count, device_logits)
    compared(host, device, count)
    assert host.held[[1, 2]].all() and host.drafted[[1, 2]].tolist() == [3, 3]
    # The launch's F: others are in it, at other places. Its lines, and where the next S finds the runs.
    host.rows = np.array([2, 5, 0, 1])
    host.samples = np.ones(4, np.bool_)
    for slots_of in (device.rows.slots, device.rows.sample_slots):
        slots_of[:4] = torch.from_numpy(host.rows).int()
        slots_of[4:] = ROWS
    host.most_drafts, host.most_guesses = 5, 2
    assert device.drafts is not None
    device.drafts.guesses.fill_(2)
    device.counter.fill_(host.number)
    host.draft()
    device.draft(4, 5)
    compare_lines(host, device, 5, 0)
    assert host.drafted[[1, 2]].tolist() == [3, 3], "they keep them"
    for slot in (1, 2):
        epoch, position = int(host.mask_epoch[slot]), int(host.seq_len[slot])
        for known in range(3 + (slot == 1)):  # the last mask of row 2 is late
            run = host.proposed[slot, :known]
            write_mask(memory, slot, epoch, position, token_mask([*range(9)], VOCAB), run)
    logits[0] = np.random.default_rng(7).normal(size=logits[0].shape).astype(np.float32)  # what this F leaves
    left = by_slot(logits)
    # A line that nobody needs, and that of a row that is held, leaves its logits where nobody reads.
    left.view(1 + MOST, ROWS + 1, VOCAB)[:, ROWS] = float("nan")
    on_the_cpu(host, logits, 5)
    for name in ("cells", "logprob", "top_ids", "top_logprobs", "drafted"):
        getattr(device._results, name).fill_(STALE)
    verified(device, 4, 5, left)
    cells = compared(host, device, 5)
    assert not host.held[[1, 2]].any() and host.drafted[2] == 2
    assert not (cells[[0, 3], 0] & (HELD | VOID)).any()


def test_a_line_that_is_replaced_between_its_tag_and_its_mask_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker writes the next position's mask when the kernel has looked at the tag of this one."""
    if DEVICE.type == "cuda":
        pytest.skip("nothing can be written there between two instructions of a kernel")
    from triton.runtime import interpreter

    host, _, _ = masked_runs(2, 7, 9)
    memory = host.masks
    assert memory is not None
    slot = 1
    host.rows, host.samples, host.alive[slot] = np.array([slot]), np.ones(1, np.bool_), True
    host.drafted[slot] = 2
    epoch, position = int(host.mask_epoch[slot]), int(host.seq_len[slot])
    host.proposed[slot, :3] = [3, 4, NO_DRAFT]
    original = interpreter.InterpreterBuilder.create_masked_load
    for replaced in range(3):
        for count in range(3):
            write_mask(memory, slot, epoch, position, token_mask([1, 2, 3, 4], VOCAB), host.proposed[slot, :count])
        device = device_rows(host, 8)
        point_at_runs(device, host, 7)
        seen: list[int] = []

        def changed(builder: Any, ptrs: Any, *rest: Any, seen: list[int] = seen, replaced: int = replaced) -> Any:
            begin = memory.lines[slot, len(seen) % 3].ctypes.data
            if len(seen) < 3 and int(ptrs.data.reshape(-1)[0]) == begin:  # a whole line
                if len(seen) == replaced:
                    run = host.proposed[slot, :replaced]
                    write_mask(memory, slot, epoch, position + 1, token_mask([9], VOCAB), run)
                seen.append(replaced)
            return original(builder, ptrs, *rest)

        with monkeypatch.context() as patched:
            patched.setattr(interpreter.InterpreterBuilder, "create_masked_load", changed)
            device.judge(1, 7)
        assert len(seen) == replaced + 1, "the masks behind one that is not there are not looked at"
        assert device.masks is not None and device.drafts is not None
        assert bool(device.masks.held[slot]) == (replaced == 0)
        assert int(device.drafts.drafted[slot]) == (2 if replaced == 0 else replaced - 1)
        memory.lines[:] = 0
