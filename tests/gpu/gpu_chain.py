"""A whole engine over a small random model, on the GPU or on the CPU with the same weights."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runahead.cuda_graphs.device import Device
from runahead.cuda_graphs.host_device import HostDevice
from runahead.cuda_graphs.rings import RingLayout, allocate_rings
from runahead.runtime.engine.loop import Engine
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.masks.masks import Masks
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.models.architecture import ModelWeights
from runahead.runtime.models.blocks.dense import DenseConfig
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.rope import RopeScaling
from runahead.runtime.models.weights import dummy_weights
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.process.parts import state_bytes
from runahead.runtime.programs.cpu.program import HostProgram
from runahead.runtime.row_record import token_mask
from runahead.runtime.scheduler.drafts import DraftChoice
from runahead.runtime.scheduler.ledger import Ledger
from runahead.runtime.scheduler.outcomes import Deferred
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import MAX_STOP_IDS, SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit
from tests.runtime.chain import MemoryLinks
from tests.runtime.models.dense_configs import dense_config

if TYPE_CHECKING:  # Triton is loaded when it is known on what it runs
    from runahead.runtime.programs.cuda.draft_model import GpuDraftNetwork

# Of models whose layers repeat each other in a test: each takes Triton's interpreter its time.
LAYERS = 2 if torch.cuda.is_available() else 1
BLOCK_SIZE = 16
PREFILL_CHUNK = 32
MAX_PREFILL_TOKENS = 64
BULK_WORDS = 1 << 14
MAX_TOP = 4
PENALTY_SLOTS = 4
SNAPSHOT_TOKENS = 32  # from one border with a snapshot to the next


def small_config(**changes: Any) -> DenseConfig:
    """A llama of two layers."""
    base: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": RopeScaling(),
        "windows": (0, 0),
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_ids": (1,),
        "bos_token_id": None,
        "dtype": torch.float32,
    }
    return dense_config(**(base | changes))


def _plain(weight: torch.Tensor) -> torch.Tensor:
    return weight


def random_weights(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> ModelWeights:
    """On the CPU, the same for the same seed."""
    return dummy_weights(config, dtype, torch.device("cpu"), _plain, seed)


def moved(weights: Any, device: torch.device) -> Any:
    """The same weights on another device."""
    if isinstance(weights, torch.Tensor):
        return weights.to(device)
    if isinstance(weights, tuple):
        return tuple(moved(item, device) for item in weights)
    if dataclasses.is_dataclass(weights) and not isinstance(weights, type):
        changes = {field.name: moved(getattr(weights, field.name), device) for field in dataclasses.fields(weights)}
        return dataclasses.replace(weights, **changes)
    return weights


@dataclasses.dataclass
class EngineUnderTest:
    """An engine, its device, and what it was told and said."""

    engine: Engine
    device: Device
    program: Any
    links: MemoryLinks

    def submit(
        self, handle: int, prompt: Sequence[int], sampling: SamplingParams, stopping: StoppingParams,
        structure: str = "",
    ) -> None:  # fmt: skip
        size = self.engine.scheduler.pool.block_size
        submit = prepared_submit(
            handle, f"r{handle}", np.asarray(prompt, np.int32), sampling, stopping, block_size=size,
            structure=structure,
        )  # fmt: skip
        self.links.tell(1, submit)

    def run(self, turns: int = 100_000) -> None:
        """Turn until everything has ended, then compare the device's rows with the host's."""
        for _ in range(turns):
            self.engine.turn()
            if not self.links.unread and not len(self.engine.registry) and not self.engine.ledger.in_flight:
                break
        else:
            raise AssertionError(f"no end after {turns} turns")
        self.engine.scheduler.pool.check()
        self.engine.scheduler.rows.check()

    def tokens(self) -> dict[int, list[int]]:
        """Tokens by handle, in the order in which they came."""
        found: dict[int, list[int]] = {}
        for _, message in self.links.sent:
            if isinstance(message, m.Output):
                handles = np.frombuffer(message.handles, np.int64).tolist()
                for handle, token in zip(handles, np.frombuffer(message.tokens, np.int32).tolist(), strict=True):
                    found.setdefault(handle, []).append(token)
        return found

    def reasons(self) -> dict[int, int]:
        """Finish reasons by handle; every request has exactly one end."""
        ends = [end for _, message in self.links.sent if isinstance(message, m.Output) for end in message.finished]
        assert len({end.handle for end in ends}) == len(ends)
        return {end.handle: end.reason for end in ends}


def engine_over(
    config: ModelConfig,
    device: Device,
    program: Any,
    run_ahead: int,
    max_rows: int,
    num_blocks: int,
    counters_from: int = 0,
    drafts: DraftChoice | None = None,
    draft_rows: int = 0,
    masks: Masks | None = None,
    forced: int = 0,
    snapshots: int = 0,
    looks_up: bool = True,
) -> EngineUnderTest:
    """counters_from: launches and epochs begin after this number, as the device was told. drafts: how many each launch
    verifies, of up to draft_rows rows, as a GPU does it. masks: of rows with a grammar. forced: drafts of such a row,
    where its grammar forces them. snapshots: of states, that the program has room for, at every SNAPSHOT_TOKENS-th
    token. looks_up: the drafter, if there is one, looks up what followed before, and has no layers."""
    limits = SchedulerLimits(
        config.max_position_embeddings,
        config.vocab_size,
        config.eos_token_ids,
        PREFILL_CHUNK,
        MAX_PREFILL_TOKENS,
        PLAN_WORDS,
        BULK_WORDS,
        penalty_slots=PENALTY_SLOTS,
        drafts=0 if drafts is None else drafts.most,
        draft_rows=draft_rows,
        forced_drafts=forced,
        history=drafts is not None and looks_up,
        guesses_along_masks=looks_up,
        has_state=state_bytes(config) > 0,
        snapshots=snapshots,
        snapshot_tokens=SNAPSHOT_TOKENS if snapshots else 0,
    )
    ledger: Ledger[Deferred] = Ledger(run_ahead, 512, counters_from)
    rows = Rows(max_rows, MAX_STOP_IDS, config.max_position_embeddings, epoch=counters_from)
    scheduler = Scheduler(limits, rows, BlockPool(num_blocks, BLOCK_SIZE), ledger, drafts)
    links = MemoryLinks()
    return EngineUnderTest(Engine(device, scheduler, links, max_queue=1000, masks=masks), device, program, links)


def layout_for(run_ahead: int, max_rows: int, drafts: int = 0) -> RingLayout:
    tokens = max_rows + MAX_PREFILL_TOKENS + max_rows * drafts
    return RingLayout(run_ahead + 2, PLAN_WORDS, BULK_WORDS, max_rows, MAX_TOP, drafts, tokens)


def cpu_engine(
    config: ModelConfig, weights: ModelWeights, run_ahead: int, *, max_rows: int = 8, num_blocks: int = 129,
    snapshots: int = 0,
) -> EngineUnderTest:  # fmt: skip
    """The reference: host device, reference kernels, float32."""
    kernels = ReferenceKernels()
    rings = allocate_rings(layout_for(run_ahead, max_rows))
    program = HostProgram(
        Decoder(config, weights, kernels),
        rings,
        max_rows=max_rows,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        context_length=config.max_position_embeddings,
        penalty_slots=PENALTY_SLOTS,
        snapshots=snapshots,
        snapshot_tokens=SNAPSHOT_TOKENS,
    )
    host = HostDevice(program, rings)
    return engine_over(config, host, program, run_ahead, max_rows, num_blocks, snapshots=snapshots)


def cuda_engine(
    config: ModelConfig,
    weights: ModelWeights,
    run_ahead: int,
    *,
    max_rows: int = 8,
    num_blocks: int = 129,
    counters_from: int = 0,
    drafts: DraftChoice | None = None,
    draft_rows: int = 0,
    draft_forms: tuple[int, ...] = (),
    masks: Masks | None = None,
    mask_memory: MaskMemory | None = None,
    snapshots: int = 0,
    make_head: Callable[[Decoder], GpuDraftNetwork] | None = None,
) -> EngineUnderTest:
    """The same on the GPU: captured graphs and Triton kernels. Free KV blocks and state slots are NaN at the start.
    drafts, draft_rows: as `engine_over`'s; draft_forms: numbers of drafts that graphs are captured for. masks: of rows
    with a grammar, written to mask_memory, which has room behind as many drafts as may be forced. make_head: of the
    model, in the place of the drafter that looks up what followed before."""
    from runahead.cuda_graphs.cuda_device import CudaDevice, allocate_mapped_rings
    from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
    from tests.runtime.kernels.poisoned_program import PoisonedProgram

    guessed, forced = 0 if drafts is None else drafts.most, 0 if mask_memory is None else mask_memory.drafts
    rings = allocate_mapped_rings(layout_for(run_ahead, max_rows, max(guessed, forced)))
    model = Decoder(config, moved(weights, torch.device("cuda")), TritonKernelSet())
    program = PoisonedProgram(
        model,
        rings,
        max_rows=max_rows,
        max_tokens=max_rows + MAX_PREFILL_TOKENS,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        context_length=config.max_position_embeddings,
        penalty_slots=PENALTY_SLOTS,
        drafts=guessed,
        draft_rows=draft_rows,
        masks=mask_memory,
        snapshots=snapshots,
        snapshot_tokens=SNAPSHOT_TOKENS,
        head=None if make_head is None else make_head(model),
    )
    device = CudaDevice(
        program,
        rings,
        max_rows=max_rows,
        mixed_tokens=max_rows + MAX_PREFILL_TOKENS,
        launched=counters_from,
        draft_forms=draft_forms,
        draft_rows=draft_rows,
        masked=mask_memory is not None,
        forced_rows=0 if make_head is None else draft_rows,
    )
    program.poison_blocks(tuple(range(1, num_blocks)))
    for slot in range(max_rows + snapshots):
        program.poison_state_slot(slot)
    torch.cuda.synchronize()
    return engine_over(
        config, device, program, run_ahead, max_rows, num_blocks, counters_from, drafts=drafts,
        draft_rows=draft_rows, masks=masks, forced=forced, snapshots=snapshots, looks_up=make_head is None,
    )  # fmt: skip


def check_depth(under_test: EngineUnderTest, run_ahead: int) -> None:
    """Launches were as many ahead as was asked for, and no more; which shows in what ends wasted that nobody could
    foresee: a row in each launch that is queued by then. (One that comes with the last token allowed wastes none.)

    Of an engine that was told of marks one by one.
    """
    stats = under_test.engine.stats()
    full = max(1, run_ahead)
    assert (stats.run_ahead, stats.ledger_depth_max, max(stats.launches_by_depth)) == (run_ahead, full, full)
    unforeseen = sum(stats.finished.get(reason, 0) for reason in ("END_OF_SEQUENCE", "STOP"))
    if full == 1:
        assert 0 < stats.void_rows <= unforeseen
    else:
        assert stats.void_rows > unforeseen, "as if no launch had been ahead"


def random_requests(
    config: ModelConfig, count: int, seed: int
) -> list[tuple[list[int], SamplingParams, StoppingParams]]:
    """Greedy and sampled requests of many kinds."""
    dice = random.Random(seed)
    requests = []
    for index in range(count):
        prompt = [dice.randrange(2, config.vocab_size) for _ in range(dice.choice([1, 3, 20, 33, 64, 90]))]
        sampling = SamplingParams(
            temperature=dice.choice([0.0, 0.0, 0.8, 1.3]),
            top_k=dice.choice([0, 0, 10]),
            top_p=dice.choice([1.0, 1.0, 0.8]),
            min_p=dice.choice([0.0, 0.0, 0.05]),
            seed=dice.getrandbits(64),
            bias_ids=(3, 5) if index % 5 == 4 else (),
            bias_values=(1.0, -2.0) if index % 5 == 4 else (),
            allowed_mask=token_mask(range(40), config.vocab_size).tobytes() if index % 7 == 6 else b"",
            logprobs=dice.choice([-1, -1, 0, 3]),
        )
        stopping = StoppingParams(
            max_tokens=dice.randrange(1, 40),
            min_tokens=dice.choice([0, 0, 5]),
            stop_token_ids=tuple(dice.sample(range(config.vocab_size), dice.choice([0, 2]))),
        )
        requests.append((prompt, sampling, stopping))
    return requests
