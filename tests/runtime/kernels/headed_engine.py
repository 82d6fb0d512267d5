"""Whole engines with a drafter with layers that is right now and then: on the CPU, by Triton's kernels launched one by
one, and with captured graphs on a GPU. Some over a model that keeps recurrent states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from runahead.cuda_graphs.device import Device
from runahead.cuda_graphs.host_device import HostDevice
from runahead.cuda_graphs.rings import allocate_rings
from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.load import load_model
from runahead.runtime.process.parts import state_bytes
from runahead.runtime.programs.cpu.program import HostProgram
from runahead.runtime.programs.cuda.draft_model import load_drafter
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.gpu import gpu_chain
from tests.runtime.kernels.drafted_engine import SynchronousProgram
from tests.runtime.kernels.head_on_triton import files_of, rings_for
from tests.runtime.kernels.poisoned_program import PoisonedProgram
from tests.runtime.models.checkpoints import BASE
from tests.runtime.models.eagle3_heads import save_foreseen3
from tests.runtime.models.eagle_heads import CONFIG, save_foreseen
from tests.runtime.models.qwen_heads import IN_TILES, save_foreseen_qwen


def save_its_own(target: Path, model: Path) -> None:
    """A target each of whose tokens follows from the one before, twice."""
    with TemporaryDirectory() as head:
        for folder in (target, model):
            save_foreseen(folder, Path(head) / "head")


def save_over_states(target: Path, _: Path) -> None:
    """A target whose states count: a token follows from the one before in most places, not in all."""
    save_foreseen_qwen(target, case=IN_TILES, noise=_BY_STATES)


OVER_STATES: Final = "mtp over states"
# What writes the pair, where what drafts lies, and which of its products is disturbed.
KINDS: Final = {
    "eagle-1": (save_foreseen, "head", "fc.weight"),
    "eagle-3": (save_foreseen3, "head", "midlayer.self_attn.o_proj.weight"),
    OVER_STATES: (save_over_states, "target", "mtp.layers.0.self_attn.o_proj.weight"),
    "model": (save_its_own, "model", "lm_head.weight"),
}
CONTEXT, NUM_BLOCKS, MAX_ROWS, DRAFTS = 128, 60, 4, 3
_NOISE: Final = 0.1  # in what the head makes of a token: it is right now and then
_BY_STATES: Final = 0.08  # of what the layers of a model with states add to what the token before says
SERVED: Final = 3  # requests, which begin with the same launch
SNAPSHOTS: Final = 6  # of states, where a model keeps some


class Always:
    """A `DraftChoice` of as many drafts as there may be."""

    most = DRAFTS

    def drafts(self, number: int, rows: int) -> int:
        return self.most

    def stays_until(self, number: int) -> int:
        return number

    def learn(self, number: int, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        pass


def write_pair(folder: Path, kind: str) -> None:
    """A target each of whose tokens follows from the one before, and a head or a model that knows nearly which."""
    write, drafts, disturbed = KINDS[kind]
    # The context that scheduler and program have alike.
    sizes = {"intermediate_size": 128, "max_position_embeddings": CONTEXT}
    with mock.patch.dict(BASE, sizes), mock.patch.dict(CONFIG, sizes):
        write(folder / "target", folder / drafts)
    path = folder / drafts / "model.safetensors"
    tensors = load_file(path)
    noise = torch.randn(tensors[disturbed].shape, generator=torch.Generator().manual_seed(3))
    tensors[disturbed] = tensors[disturbed] + _NOISE * noise
    save_file(tensors, path, {"format": "pt"})


def cpu_engine(folder: Path, run_ahead: int, *, drafts: bool) -> gpu_chain.EngineUnderTest:
    """The reference, in float32."""
    kernels, cpu = ReferenceKernels(), torch.device("cpu")
    checkpoint = open_checkpoint(folder / "target")
    target = load_model(checkpoint, cpu, torch.float32, "auto", kernels)
    files = files_of(folder, checkpoint, target.config, CONTEXT)
    rings = allocate_rings(gpu_chain.layout_for(run_ahead, MAX_ROWS, DRAFTS if drafts else 0))
    program = HostProgram(
        target, rings, max_rows=MAX_ROWS, num_blocks=NUM_BLOCKS, block_size=gpu_chain.BLOCK_SIZE,
        context_length=CONTEXT, penalty_slots=gpu_chain.PENALTY_SLOTS,
        head=files.load(target, kernels, CONTEXT, drawn=False) if drafts else None,
        snapshots=_snapshots(target.config), snapshot_tokens=gpu_chain.SNAPSHOT_TOKENS,
    )  # fmt: skip
    return _engine(target.config, HostDevice(program, rings), program, run_ahead, drafts)


def triton_engine(
    folder: Path,
    device: torch.device,
    run_ahead: int,
    *,
    drafts: bool,
    dtype: torch.dtype = torch.float32,
    captured: bool = False,
) -> gpu_chain.EngineUnderTest:
    """An engine by the Triton kernels. captured: launches are graphs on a GPU. Free KV blocks, and states, are NaN at
    the start."""
    checkpoint = open_checkpoint(folder / "target")
    target = load_model(checkpoint, device, dtype, "auto", TritonKernelSet())
    files = files_of(folder, checkpoint, target.config, CONTEXT)
    rings = rings_for(gpu_chain.layout_for(run_ahead, MAX_ROWS, DRAFTS if drafts else 0), device)
    tokens, snapshots = MAX_ROWS + gpu_chain.MAX_PREFILL_TOKENS, _snapshots(target.config)
    sizes: Mapping[str, Any] = {
        "max_rows": MAX_ROWS, "max_tokens": tokens, "num_blocks": NUM_BLOCKS, "block_size": gpu_chain.BLOCK_SIZE,
        "context_length": CONTEXT, "penalty_slots": gpu_chain.PENALTY_SLOTS, "drafts": DRAFTS if drafts else 0,
        "draft_rows": MAX_ROWS if drafts else 0,
        "head": load_drafter(files, target, CONTEXT, drawn=False) if drafts else None,
        "snapshots": snapshots, "snapshot_tokens": gpu_chain.SNAPSHOT_TOKENS,
    }  # fmt: skip
    program = PoisonedProgram(target, rings, **sizes) if captured else SynchronousProgram(target, rings, **sizes)
    made: Device
    if captured:
        from runahead.cuda_graphs.cuda_device import CudaDevice

        made = CudaDevice(
            program, rings, max_rows=MAX_ROWS, mixed_tokens=tokens, draft_forms=(DRAFTS,) if drafts else (),
            draft_rows=MAX_ROWS if drafts else 0,
        )  # fmt: skip
    else:
        made = HostDevice(program, rings)
    program.poison_blocks(tuple(range(1, NUM_BLOCKS)))
    for slot in range(MAX_ROWS + snapshots):
        program.poison_state_slot(slot)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return _engine(target.config, made, program, run_ahead, drafts)


def _engine(config: Any, device: Device, program: Any, run_ahead: int, drafts: bool) -> gpu_chain.EngineUnderTest:
    return gpu_chain.engine_over(
        config, device, program, run_ahead, MAX_ROWS, NUM_BLOCKS, drafts=Always() if drafts else None,
        draft_rows=MAX_ROWS if drafts else 0, looks_up=False, snapshots=_snapshots(config),
    )  # fmt: skip


def _snapshots(config: ModelConfig) -> int:
    return SNAPSHOTS if state_bytes(config) else 0


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine has said; of drafts by their place in the run how many it has looked at and found right; and of
    prompts how many tokens it has found computed, and snapshots of states behind them."""

    tokens: dict[int, list[int]]
    reasons: dict[int, int]
    drafted: list[int]
    accepted: list[int]
    cached_tokens: int
    snapshots_found: int


def served(under_test: gpu_chain.EngineUnderTest) -> Served:
    """Requests whose prompts are read by one launch, so that each has its drafts in the same of its launches at every
    depth; then one that goes on from the longest of them, behind tokens of which some were drafted. At the end the
    device's rows, and snapshots, are compared with the host's."""
    dice = np.random.default_rng(5)
    with torch.inference_mode():
        for handle in range(SERVED):
            prompt = dice.integers(2, 160, 8 + 7 * handle).tolist()
            sampling = SamplingParams(temperature=(0.0, 0.9, 0.4)[handle], seed=handle)
            under_test.submit(handle, prompt, sampling, StoppingParams(max_tokens=8 + 4 * handle, ignore_eos=True))
        under_test.run()
        longest = [*prompt, *under_test.tokens()[SERVED - 1]]
        under_test.submit(SERVED, longest, SamplingParams(), StoppingParams(max_tokens=8, ignore_eos=True))
        under_test.run()
        under_test.engine.drain("test")
    under_test.device.close()
    stats = under_test.engine.stats()
    drafted, accepted = (
        [counts[place] for place in sorted(counts)] for counts in (stats.drafted, stats.accepted)
    )  # fmt: skip
    return Served(
        under_test.tokens(), under_test.reasons(), drafted, accepted, stats.cached_tokens, stats.snapshots_found
    )  # fmt: skip
