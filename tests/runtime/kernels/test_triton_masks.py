"""Rows with a grammar by the kernels: whose mask is there, what is sampled under it, and who pays for it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.kernels.triton_device import on, triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.device import Form, LaunchShape  # noqa: E402
from runahead.cuda_graphs.rings import allocate_rings  # noqa: E402
from runahead.runtime.kernels.reference.sampling import Sampled, sample_rows  # noqa: E402
from runahead.runtime.kernels.row_state import RowState  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.kernels.triton.row_state import grammar_masks  # noqa: E402
from runahead.runtime.kernels.triton.row_state.grammar_masks import MaskState, judge, make_mask_state  # noqa: E402
from runahead.runtime.kernels.triton.sampling.sampler import make_sampler_buffers, sample_rows_cuda  # noqa: E402
from runahead.runtime.masks.mask_memory import MaskMemory  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from runahead.runtime.programs.cuda.program import TritonProgram  # noqa: E402
from runahead.runtime.row_record import token_mask  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402
from tests.runtime.kernels.masked_engine import masked_config  # noqa: E402
from tests.runtime.kernels.sampling_oracle import RowSpec, penalties_of, state_of  # noqa: E402
from tests.runtime.kernels.test_sampling_triton import MAX_TOP, mixed_specs, random_logits  # noqa: E402
from tests.runtime.masks.one_row import read_mask, write_mask  # noqa: E402

# The interpreter's own way with a loop whose length is read on the device.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

ROWS = 24
EPOCH = (1 << 40) + 3


def with_grammars(specs: list[RowSpec], vocab_size: int) -> RowState:
    """Two rows of three have one."""
    state = state_of(specs, vocab_size)
    state.mask_epoch[:] = torch.tensor([EPOCH + i if i % 3 else 0 for i in range(len(specs) + 1)])
    state.mask_epoch[-1] = 0
    return state


def judged(state: RowState, memory: MaskMemory) -> tuple[MaskState, RowState, torch.Tensor]:
    """By the kernel; the state on the device; the slots, in another order than theirs."""
    there = on(DEVICE, state)
    slots = torch.tensor([*range(ROWS)][::-1] + [ROWS] * 8, dtype=torch.int32)
    masks = make_mask_state(memory, DEVICE)
    masks.held.fill_(9)
    judge(ROWS + 2, slots.to(DEVICE), there, masks)
    return masks, there, slots[:ROWS].to(DEVICE)


def spoil(memory: MaskMemory, state: RowState, slot: int, kind: int, mask: Any) -> None:
    """The line of a row as it may be met: right, another row's, another position's, half written."""
    epoch, position = int(state.mask_epoch[slot]), int(state.seq_len[slot])
    match kind:
        case 0:
            write_mask(memory, slot, epoch, position, mask)
        case 1:
            write_mask(memory, slot, epoch - 1, position, mask)  # the row that had the slot before was as long
        case 2:
            write_mask(memory, slot, epoch, position - 1, mask)
        case 3:
            write_mask(memory, slot, epoch, position, mask)
            memory.lines[slot, 0, -1] ^= 1 << (slot % 60)
        case 4:
            write_mask(memory, slot, epoch, position - 1, mask)
            memory.lines[slot, 0, 1] = position


@pytest.mark.parametrize("vocab_size", [97, 2300])
def test_a_row_is_held_where_the_reference_finds_no_mask(vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    specs = [dataclasses.replace(one, alive=i % 7 != 5) for i, one in enumerate(mixed_specs(ROWS, vocab_size, seed=5))]
    state = with_grammars(specs, vocab_size)
    memory = MaskMemory(ROWS, vocab_size)
    for slot in range(ROWS):
        spoil(
            memory,
            state,
            slot,
            (0, 1, 0, 2, 3, 0, 4, 5)[slot % 8],
            random.integers(-(2**31), 2**31, -(-vocab_size // 32)),
        )
    masks, _, _ = judged(state, memory)
    seen = Counter[str]()
    for slot in range(ROWS):
        alive, epoch = bool(state.alive[slot]), int(state.mask_epoch[slot])
        expected = read_mask(memory, slot, epoch, int(state.seq_len[slot])) if alive and epoch else None
        held = bool(alive and epoch and expected is None)
        assert (int(masks.held[slot]), int(masks.samples[slot])) == (held, alive and not held), slot
        seen.update({"held": held, "ended": not alive, "sampled": expected is not None, "plain": not epoch})
        if expected is not None:
            own = masks.words[slot, 0, masks.mask_at :].cpu().numpy()[: expected.size]
            assert own.tolist() == expected.tolist(), "the copy that later kernels read"
    assert min(seen.values()) > 1 and int(masks.held[ROWS]) == 9, seen


def sampled_under(masks: MaskState, state: RowState, slots: torch.Tensor, penalties: Any, logits: torch.Tensor) -> Any:
    buffers = make_sampler_buffers(ROWS, logits.shape[1], MAX_TOP, DEVICE)
    return sample_rows_cuda(
        logits.to(DEVICE), state, on(DEVICE, penalties), slots, Form.FULL, buffers, slots, masks=masks
    )


def masked_case(vocab_size: int, seed: int) -> tuple[RowState, Any, MaskMemory, torch.Tensor, Sampled]:
    """Rows of every kind, each with its mask: of many tokens, of few, of one, of none, of those that are not allowed.
    What the reference says of them is in the order of the slots."""
    random = np.random.default_rng(seed)
    specs = [dataclasses.replace(one, alive=i % 11 != 5) for i, one in enumerate(mixed_specs(ROWS, vocab_size, seed))]
    state, penalties = with_grammars(specs, vocab_size), penalties_of(specs, vocab_size)
    memory, masks = MaskMemory(ROWS, vocab_size), {}
    for slot in range(ROWS):
        if int(state.mask_epoch[slot]):
            count = (vocab_size // 2, 5, 1, 0)[slot % 4]
            masks[slot] = token_mask(random.permutation(vocab_size)[:count].tolist(), vocab_size)
            write_mask(memory, slot, int(state.mask_epoch[slot]), int(state.seq_len[slot]), masks[slot])
    logits = random_logits(ROWS + 1, vocab_size, seed)
    logits[4, 3] = float("nan")
    expected = sample_rows(logits[:ROWS], state, penalties, torch.arange(ROWS), Form.FULL, MAX_TOP, masks=masks)
    return state, penalties, memory, logits, expected


@pytest.mark.parametrize(("vocab_size", "seed"), [(97, 1), (2300, 2)])
def test_what_is_sampled_under_masks_is_what_the_reference_samples(vocab_size: int, seed: int) -> None:
    state, penalties, memory, logits, expected = masked_case(vocab_size, seed)
    masks, there, slots = judged(state, memory)
    memory.lines[:] = -1  # whatever is written meanwhile is for the next launch
    found = sampled_under(masks, there, slots, penalties, logits)
    order = slots.cpu().long()
    assert expected.nothing_left is not None and expected.top_ids is not None and expected.logprob is not None
    assert found.nothing_left.tolist() == expected.nothing_left[order].tolist()
    assert found.tokens.tolist() == expected.tokens[order].tolist()
    assert found.finite.tolist() == expected.finite[order].tolist()
    assert found.top_ids.tolist() == expected.top_ids[order].tolist()
    torch.testing.assert_close(found.logprob.cpu(), expected.logprob[order], atol=1e-6, rtol=1e-6)
    assert bool(expected.nothing_left.any()) and int(expected.tokens.unique().numel()) > 8


def test_a_row_that_is_held_is_sampled_by_the_next_launch_from_the_same_logits() -> None:
    state, penalties, memory, logits, expected = masked_case(97, 3)
    late = [slot for slot in range(ROWS) if int(state.mask_epoch[slot]) and bool(state.alive[slot]) and slot % 2]
    kept = memory.lines[late].copy()
    memory.lines[late] = 0
    masks, there, slots = judged(state, memory)
    assert [slot for slot in range(ROWS) if int(masks.held[slot])] == late
    memory.lines[late] = kept
    judge(ROWS, slots.to(DEVICE), there, masks)
    assert not bool(masks.held[:ROWS].any())
    found = sampled_under(masks, there, slots, penalties, logits)
    assert found.tokens.tolist() == expected.tokens[slots.cpu().long()].tolist()


class Launched:
    """Which kernels are launched, and on how many programs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import interpreter

        self.grids: list[tuple[str, Any]] = []
        original = interpreter.GridExecutor.__call__

        def call(executor: Any, *arguments: Any, **options: Any) -> Any:
            self.grids.append((executor.fn.__name__, executor.grid))
            return original(executor, *arguments, **options)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)

    def take(self) -> list[tuple[str, Any]]:
        taken, self.grids = self.grids, []
        return taken


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu/test_masks_on_cuda.py counts the nodes of graphs")
def test_a_launch_without_rows_with_a_grammar_has_the_kernels_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    config, launched = masked_config(), Launched(monkeypatch)
    rings = allocate_rings(gpu_chain.layout_for(1, 4))
    model = Decoder(config, gpu_chain.random_weights(config), TritonKernelSet())
    found = {}
    for masks in (None, MaskMemory(4, config.vocab_size)):
        program = TritonProgram(
            model, rings, max_rows=4, max_tokens=20, num_blocks=9, block_size=16, context_length=96, masks=masks
        )
        for form in Form:
            shape = LaunchShape(1, 2, form, 2, 2, is_decode=True)
            program.sample(shape)
            program.apply(shape)
            program.forward(shape)
            found[form, masks is not None] = launched.take()
    for form in Form:
        assert found[form, True] == found[form, False] != []
    shape = LaunchShape(1, 2, Form.FULL, 2, 2, is_decode=True)
    program.sample(shape)
    plain = [name for name, _ in launched.take()]
    program.sample(shape._replace(masked=True))
    assert [name for name, _ in launched.take()] == [grammar_masks._judge_kernel.fn.__name__, *plain]


def test_more_drafts_than_there_can_be_masks_behind_are_refused() -> None:
    config = masked_config()
    model = Decoder(config, gpu_chain.random_weights(config), TritonKernelSet())
    with pytest.raises(ValueError, match="there are masks behind 1 drafts of a row, and a drafter makes up to 3"):
        TritonProgram(
            model, allocate_rings(gpu_chain.layout_for(1, 4, 3)), max_rows=4, max_tokens=20, num_blocks=9,
            block_size=16, context_length=96, drafts=3, draft_rows=2, masks=MaskMemory(4, config.vocab_size, 1),
        )  # fmt: skip
