"""Rows of real models with draft heads on Triton's kernels, followed through launches as `head_worlds` does on the
CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from runahead.cuda_graphs.rings import RingLayout, RingMemory, allocate_rings
from runahead.runtime.checkpoint import Checkpoint, open_checkpoint, open_head
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
from runahead.runtime.memory.block_pool import NO_SLOT
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.drafters.draft_model import DraftModelFiles, open_draft_model
from runahead.runtime.models.drafters.eagle import open_eagle
from runahead.runtime.models.drafters.head_files import HeadFiles
from runahead.runtime.models.drafters.mtp import open_mtp
from runahead.runtime.models.load import load_model
from runahead.runtime.models.memory import memory_of
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.programs.cuda.draft_model import GpuDraftNetwork, load_drafter
from runahead.runtime.wire.parameters import SamplingParams
from tests.runtime.kernels.drafted_engine import SynchronousProgram
from tests.runtime.kernels.poisoned_program import PoisonedProgram
from tests.runtime.launches import ENDLESS, Launches, _Row, over_program
from tests.runtime.models.eagle_heads import VOCAB
from tests.runtime.programs.head_worlds import ALL, BLOCK, EACH, GREEDY, MOST, PROMPT, ROWS

DRAFT_ROWS = 3


def rings_for(layout: RingLayout, device: torch.device) -> RingMemory:
    """That kernels on this device read and write."""
    if device.type != "cuda":
        return allocate_rings(layout)
    from runahead.cuda_graphs.cuda_device import allocate_mapped_rings

    return allocate_mapped_rings(layout)


def files_of(folder: Path, of_target: Checkpoint, target: ModelConfig, context: int) -> HeadFiles | DraftModelFiles:
    """What drafts in the folder in which a `World` was written: a model, a head, or the target's own head."""
    if (folder / "model").exists():
        both = open_checkpoint(folder / "model"), target, of_target
        return open_draft_model(*both, context, "draft_model", "context_length", has_weights=True)
    if (folder / "head").exists():
        return open_eagle(open_head(folder / "head"), target, context, "draft_model", "context_length")
    return open_mtp(of_target, target, "drafter mtp", has_weights=True)


@dataclass(frozen=True, slots=True)
class TritonWorld:
    """What a `World` has, in the same folder."""

    target: Decoder
    head: GpuDraftNetwork

    def started(self) -> tuple[PoisonedProgram, Launches]:
        """Every KV block is NaN at the start. Of a model that keeps states each row has a place for a snapshot at
        every border."""
        has_states = any(kept.state for kept in memory_of(self.target.weights.layers).kept)
        snapshots = ROWS * EACH if has_states else 0
        rings = rings_for(RingLayout(4, PLAN_WORDS, 8192, ROWS, 4, prompt_tokens=200, drafts=MOST), self.target.device)
        program = SynchronousProgram(
            self.target, rings, max_rows=ROWS, max_tokens=160, num_blocks=ROWS * EACH + 1, block_size=BLOCK,
            context_length=EACH * BLOCK, drafts=MOST, draft_rows=DRAFT_ROWS, head=self.head,
            snapshots=snapshots, snapshot_tokens=BLOCK,
        )  # fmt: skip
        program.poison_blocks(tuple(range(1, ROWS * EACH + 1)))
        program.poison_snapshots(tuple(range(1, snapshots + 1)))
        return program, Launches(over_program(program), rings, VOCAB, EACH, EACH if has_states else None)


def triton_world(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> TritonWorld:
    """Of the folder in which a `World` was written."""
    checkpoint = open_checkpoint(folder / "target")
    target = load_model(checkpoint, device, dtype, "auto", TritonKernelSet())
    files = files_of(folder, checkpoint, target.config, EACH * BLOCK)
    return TritonWorld(target, load_drafter(files, target, EACH * BLOCK, drawn=False))


@dataclass
class HeardOnTriton:
    """A head's proposals for the row in a slot, by the row's length. The row sees others: `rights` tokens of what it is
    about to say, in a circle, and then a wrong one."""

    program: PoisonedProgram
    slot: int
    said: Sequence[int] = ()  # prompt and completion
    rights: Sequence[int] = (0,)
    heard: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._own = self.program.rows.guess
        self.program.rows.guess = self._guess

    def _guess(self, num_rows: int, count: int) -> None:
        assert self._own is not None
        self._own(num_rows, count)
        drafts, state = self.program.rows.drafts, self.program.rows.state
        assert drafts is not None
        length, there = int(state.seq_len[self.slot]), int(drafts.drafted[self.slot])
        own = drafts.proposed[self.slot, :there].tolist()
        assert (drafts.proposed[self.slot, there:] == -1).all()
        known = self.heard.get(length, own)
        assert known[: len(own)] == own[: len(known)], "it does not hang on how the row came there"
        self.heard[length] = max(known, own, key=len)
        right = self.rights[length % len(self.rights)]
        for ahead in range(there):
            token = self.said[length + ahead] if length + ahead < len(self.said) else 0
            drafts.proposed[self.slot, ahead] = token if ahead < right else (token + 1) % VOCAB


def lived_on_triton(
    world: TritonWorld, said: Sequence[int], rights: Sequence[int], drafts: Sequence[int] = (MOST,), chunk: int = ALL,
    known: int = len(PROMPT), slot: int = 0, until: int = 100, sampling: SamplingParams = GREEDY,
    began: tuple[PoisonedProgram, Launches] | None = None, cached: int = 0, beside: Mapping[int, int] | None = None,
) -> tuple[PoisonedProgram, Launches, dict[int, list[int]]]:  # fmt: skip
    """As `head_worlds.lived`: what the head has proposed, by the row's length. beside: slots of rows that decode in the
    same launches, which have begun. cached: tokens whose blocks, and the snapshot behind them, are those of row 0."""
    program, launches = world.started() if began is None else began
    own_guess = program.rows.guess
    heard = HeardOnTriton(program, slot, said, rights)
    blocks = tuple(range(1 + slot * EACH, 1 + slot * EACH + EACH))
    blocks = tuple(range(1, 1 + cached // BLOCK)) + blocks[cached // BLOCK :]
    row = _Row(list(said[:known]), len(PROMPT), sampling, NO_SLOT, blocks, ENDLESS, 1 << 20, computed=cached)
    row.state = launches.state_of(slot, cached // BLOCK, cached // BLOCK)
    launches._rows[slot] = row
    while row.computed < known:
        launches.launch({**(beside or {}), slot: chunk})
    length, number, found = known, 0, list[int]()
    while length < until:
        outcome = launches.launch({**(beside or {}), slot: 1}, drafts=drafts[number % len(drafts)])
        found += [cell.token for cell in outcome.runs[slot]]
        length, number = known + len(found), number + 1
    assert found == list(said[known : known + len(found)]), "no draft changes a token"
    program.rows.guess = own_guess
    return program, launches, heard.heard
