"""Rows of which two of three have a grammar, on the CPU and the same for the kernels, put in any state."""

from __future__ import annotations

import numpy as np
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.rings import RingLayout, allocate_rings  # noqa: E402
from runahead.runtime.drafters.ngram import NgramDrafter  # noqa: E402
from runahead.runtime.kernels.triton.row_state.drafts import make_draft_state  # noqa: E402
from runahead.runtime.kernels.triton.row_state.grammar_masks import make_mask_state  # noqa: E402
from runahead.runtime.kernels.triton.row_updates.rows import DeviceRows  # noqa: E402
from runahead.runtime.masks.mask_memory import MaskMemory  # noqa: E402
from runahead.runtime.programs.cpu.rows import HostRows  # noqa: E402
from runahead.runtime.row_record import PENALTY_TENSORS, ROW_TENSORS  # noqa: E402
from runahead.runtime.wire.parameters import MAX_BIAS, MAX_STOP_IDS  # noqa: E402
from tests.runtime.kernels.device_twin import mapped_rings  # noqa: E402
from tests.runtime.kernels.test_triton_runs import (  # noqa: E402
    BLOCK_SIZE,
    CONTEXT,
    MOST,
    ROWS,
    STALE,
    TOP,
    history_of,
)  # fmt: skip

EPOCHS = (1 << 40) + 3  # of the first row slot


def rows_with_masks(number: int, vocab_size: int, *, guesses: bool = True, snapshot_tokens: int = 0) -> HostRows:
    """Rows of which none is alive, and memory for their masks. number: of the launch before. guesses: by `ngram`.
    snapshot_tokens: from one border with a snapshot to the next, if rows have states."""
    layout = RingLayout(slots=4, plan_words=16, bulk_words=16, rows=ROWS, max_top=TOP, drafts=MOST)
    return HostRows(
        allocate_rings(layout), ROWS, CONTEXT // BLOCK_SIZE, vocab_size, BLOCK_SIZE, MAX_STOP_IDS, MAX_BIAS,
        penalty_slots=ROWS, launched=number, drafter=NgramDrafter(ROWS, CONTEXT) if guesses else None,
        masks=MaskMemory(ROWS, vocab_size, MOST), snapshot_tokens=snapshot_tokens,
    )  # fmt: skip


def device_rows(host: HostRows, launched: int, keeps_states: bool = False, kept: int = 0) -> DeviceRows:
    """Rows of the kernels that hold what these rows do, and read the same masks; poison in what they are going to
    leave. kept: row slots that have drafts; 0: all of them."""
    slots = host.alive.size
    assert host.masks is not None
    drafts = make_draft_state(
        slots, CONTEXT if host.drafter else 0, host.max_blocks, ROWS, MOST, DEVICE, kept_slots=kept or slots
    )
    masks = make_mask_state(host.masks, DEVICE)
    device = DeviceRows(
        mapped_rings(host.rings.layout, DEVICE), max_rows=ROWS, max_tokens=ROWS, block_size=BLOCK_SIZE,
        context_length=CONTEXT, vocab_size=host.vocab_size, device=DEVICE, penalty_slots=len(host.counts) - 1,
        drafts=drafts, masks=masks, keeps_states=keeps_states, snapshot_tokens=host.snapshot_tokens,
    )  # fmt: skip
    device.reset(launched)
    for name in ROW_TENSORS:
        getattr(device.state, name).copy_(torch.from_numpy(getattr(host, name)))
    for name in PENALTY_TENSORS:
        getattr(device.penalties, name).copy_(torch.from_numpy(getattr(host, name)))
    if host.drafter is not None:
        drafts.history.copy_(torch.from_numpy(history_of(host)))
    listed = np.full(device.rows.slots.shape[0], ROWS, np.int32)
    listed[: host.rows.size] = host.rows
    for slots_of in (device.rows.slots, device.rows.sample_slots):
        slots_of.copy_(torch.from_numpy(listed))
    drafts.proposed.copy_(torch.from_numpy(host.proposed))
    drafts.drafted.copy_(torch.from_numpy(host.drafted))
    drafts.forced.copy_(torch.from_numpy(host.forced))
    masks.held.copy_(torch.from_numpy(host.held))
    masks.copies.fill_(STALE)
    for name in ("cells", "logprob", "top_ids", "top_logprobs", "drafted"):
        getattr(device._results, name).fill_(STALE)
    return device


def give_grammars(host: HostRows, random: np.random.Generator) -> None:
    """To two rows of three."""
    host.mask_epoch[:] = [EPOCHS + slot if slot % 3 else 0 for slot in range(ROWS)] + [0]
    host.forced[:ROWS] = random.random(ROWS) < 0.5
