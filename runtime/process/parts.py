"""Device-independent parts of an engine: checks, sizes and the scheduler, from configuration and model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog
import torch

from runahead.cuda_graphs.buckets import MOST_MIXED_TOKENS
from runahead.cuda_graphs.device import Device
from runahead.cuda_graphs.rings import RingLayout
from runahead.runtime.checkpoint import Checkpoint, CheckpointError
from runahead.runtime.checkpoint.folder import FolderCheckpoint
from runahead.runtime.checkpoint.quantized.numbers import FLOATS
from runahead.runtime.engine.poison import Poison
from runahead.runtime.masks.masks import Masks
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.drafters.mtp import names_head
from runahead.runtime.models.memory import FP8_KV, KeptBytes, memory_of
from runahead.runtime.models.weight_formats import held_bytes, some_stay_quantized
from runahead.runtime.models.weights import check_weights, described, part_of, why_not_divided
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.process.progress import Progress
from runahead.runtime.process.sizes import NAMES, Cpu, Gpu, ModelSize, boundary_tokens, has_boundaries, with_sizes
from runahead.runtime.process.sizes import snapshot_tokens as snapshot_tokens
from runahead.runtime.rounding import ceil_div
from runahead.runtime.scheduler.draft_choice import ChoiceByAcceptance, ChoiceByForms, ChoiceOfAHead, DraftCosts
from runahead.runtime.scheduler.drafts import DraftChoice
from runahead.runtime.scheduler.ledger import Ledger
from runahead.runtime.scheduler.new_row import largest_record_words
from runahead.runtime.scheduler.outcomes import Deferred
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.wire.engine_config import (
    AUTO_DRAFTS,
    AUTO_SNAPSHOTS,
    MAX_CONTEXT,
    MOST_DRAFTS,
    ConfigError,
    EngineConfig,
)
from runahead.runtime.wire.messages import EngineInfo
from runahead.runtime.wire.parameters import MAX_STOP_IDS, MAX_TOP_LOGPROBS

# the other half is for the request's stop ids, and two may end a chat's answer
MAX_EOS_IDS: Final = MAX_STOP_IDS // 2 - 2
_PROMPT_STATES: Final = 4  # snapshots for states behind shared prompts, if there are no others
_STATE_UNIT: Final = 64  # on a GPU, a multiple of a recurrent scan's sub-chunk
_NOT_OVER_STATES: Final = {  # drafters, and why recurrent states exclude them
    "eagle": "no head of EAGLE for such a model is read yet",
    "model": "a smaller model drafts only for models that keep keys and values alone, so far",
}
# step_ms: of the 0.6B shape, the smallest measured one, on one H200. The others: the bundled model on two cores.
DRAFT_COSTS: Final = Path(__file__).with_name("measured_draft_costs.json")
_RECORDS: Final = 3  # admission records with long lists in a bulk slot beside the largest one


@dataclass(frozen=True, slots=True)
class Assembled:
    """The parts of an `Engine`, and its description for front ends."""

    device: Device
    scheduler: Scheduler
    info: EngineInfo
    poison: Poison | None
    masks: Masks


@dataclass(frozen=True, slots=True)
class MadeOnDevice:
    """The device-dependent parts of an engine.

    config: with every size. why_sizes: see `with_sizes`. blocks: KV blocks, including the null block.
    poison: for the test mode. masks: makes masks of rows with a grammar; None: the device
        takes no such rows. draft_rows: see `SchedulerLimits`. draft_step: time of a drafter's step for every row,
        relative to a launch. draft_parameters: of the drafter. snapshots: number of recurrent state snapshots.
    """

    config: EngineConfig
    why_sizes: str
    model: Decoder
    blocks: int
    device: Device
    poison: Poison | None
    masks: Masks | None = None
    draft_rows: int = 0
    draft_step: float = 0.0
    draft_parameters: int = 0
    snapshots: int = 0


# Loads the model and makes its device, from the settings, the checkpoint, the model's description, the context length,
# and callbacks for loaded bytes and captured graphs. Raises ConfigError for too few blocks, CheckpointError for
# unsupported weights.
MakeOnDevice = Callable[[EngineConfig, Checkpoint, ModelConfig, int, Progress, Progress], MadeOnDevice]


def check_model(config: EngineConfig, model: ModelConfig) -> int:
    """Refuse settings that contradict the model's `config.json`, before any weight is read. Returns the context length:
    configured, else the model's.

    Raises ConfigError for too long a context, too many end tokens, a draft head or draft model beside recurrent states,
    useless snapshot settings, and a model that can't be divided among the ranks.
    """
    longest, setting = model.max_position_embeddings, config.spelling("context_length")
    if config.context_length > longest:
        raise ConfigError(f"{setting} ({config.context_length}) is more than the model's {longest}")
    context = config.context_length or longest
    if context > MAX_CONTEXT:
        raise ConfigError(f"the model's context is {context} tokens; set {setting} to {MAX_CONTEXT} or less")
    if len(model.eos_token_ids) > MAX_EOS_IDS:
        raise ConfigError(f"the model names {len(model.eos_token_ids)} end-of-sequence ids; at most {MAX_EOS_IDS} work")
    if config.drafter in _NOT_OVER_STATES and state_bytes(model):
        others = "none, ngram or mtp" if names_head(model) else "none or ngram"
        raise ConfigError(
            f"{config.spelling('drafter')} {config.drafter} can't be combined with {model.architecture}, which keeps a "
            f"recurrent state of each request: {_NOT_OVER_STATES[config.drafter]}; set {config.spelling('drafter')} "
            f"{others}"
        )
    for name in ("state_snapshots", "state_snapshot_blocks"):
        if getattr(config, name) != AUTO_SNAPSHOTS and not state_bytes(model):
            raise ConfigError(
                f"{config.spelling(name)} ({getattr(config, name)}) has no effect with {model.architecture}, which "
                "keeps no recurrent states"
            )
    if config.kv_dtype != "auto" and all(kept.kv is None for kept in memory_of(described(model).layers).kept):
        raise ConfigError(
            f"{config.spelling('kv_dtype')} {config.kv_dtype} has no effect with {model.architecture}, which keeps no "
            "keys and values"
        )
    if config.tensor_parallel > 1 and (why := why_not_divided(model, config.tensor_parallel)):
        raise ConfigError(f"{config.spelling('tensor_parallel')} {config.tensor_parallel} can't be served: {why}")
    asks = config.state_snapshots != AUTO_SNAPSHOTS or config.state_snapshot_blocks != AUTO_SNAPSHOTS
    if asks and not has_boundaries(config, context):
        raise ConfigError(
            f"states are kept every {snapshot_tokens(config)} tokens of a request "
            f"({config.spelling('state_snapshot_blocks')}), and none goes on from there in a context of {context}: set "
            f"{config.spelling('state_snapshot_blocks')} to less, or {setting} to more"
        )
    return context


def sized(
    config: EngineConfig, weight_bytes: int, context: int, machine: Gpu | Cpu, kept: KeptBytes, drafting: int = 0,
    prompt_bytes: int = 0,
) -> tuple[EngineConfig, str]:  # fmt: skip
    """Fill in every size of a launch and log why. Returns the settings and the reason. weight_bytes: of the model.
    kept: including a drafter's. drafting: bytes of a drafter's weights. prompt_bytes: see `ModelSize`.
    """
    size = ModelSize(weight_bytes, kept.block // config.block_size, context, kept.row, drafting, prompt_bytes)
    found, why = with_sizes(config, machine, size)
    structlog.get_logger("engine").info("sizes", **{name: getattr(found, name) for name in NAMES}, why=why)
    return found, why


def bytes_to_load(config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, device: str) -> int:
    """The bytes of the weights of a GPU, or of all ranks on a CPU. device: the type of it. Raises CheckpointError for
    tensors that can't be served, ConfigError where nothing of the model can be quantized as it is asked for."""
    dtype, how = dtype_of(config, model), config.quantize
    if how != "none" and held_bytes(None, model, dtype, device, how) == held_bytes(None, model, dtype, device):
        raise ConfigError(
            f"{config.spelling('quantize')} {how} has no effect: no matrix of {model.architecture} can be held so "
            f"on {device} in {str(dtype).removeprefix('torch.')}"
        )
    ranks = 1 if device == "cpu" else config.tensor_parallel
    return held_bytes(_quantized_files(config, checkpoint), model, dtype, device, how, ranks)


def holds_quantized(config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig) -> bool:
    """Whether matrices of a rank stay quantized on a GPU. Raises CheckpointError for tensors that can't be served."""
    files = _quantized_files(config, checkpoint)
    return some_stay_quantized(files, model, dtype_of(config, model), "cuda", config.quantize, config.tensor_parallel)


def _quantized_files(config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint | None:
    """The checkpoint, where its own weights are quantized and read, or may be, as in a GGUF file."""
    is_plain = isinstance(checkpoint, FolderCheckpoint) and checkpoint.quantization() is None
    return None if is_plain or config.load_format == "dummy" else checkpoint


def check_tensors(config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig) -> None:
    """Raises CheckpointError for tensors that can't be served, by what the files' headers say: before kernels are tried
    and the first of many GiB is read."""
    if config.load_format == "dummy":
        return
    stored = check_weights(checkpoint, model)
    quantized = {name: tensor.dtype for name, tensor in stored.items() if tensor.dtype not in FLOATS}
    if config.quantize != "none" and quantized:
        name, dtype = next(iter(quantized.items()))
        raise CheckpointError(
            f"{config.spelling('quantize')} {config.quantize} needs weights in 16 or 32 bits, and the checkpoint "
            f"{checkpoint.path} is quantized already, tensor {name} as {dtype}: leave the setting out"
        )


def dtype_of(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """Return the dtype of weights and arithmetic."""
    if config.dtype != "auto":
        chosen: torch.dtype = getattr(torch, config.dtype)
        return chosen
    return torch.float32 if config.device == "cpu" else model.dtype


def bytes_kept(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> KeptBytes:
    """Return a rank's bytes of each KV block, row and snapshot. dtype: of weights and arithmetic."""
    return memory_of(part_of(model, config.tensor_parallel).layers).bytes_kept(
        config.block_size, FP8_KV if config.kv_dtype == "fp8" else dtype, most_drafts(config)
    )


def state_bytes(model: ModelConfig) -> int:
    """Return the bytes of a row's recurrent state; 0: none."""
    return sum(kept.state_bytes for kept in memory_of(described(model).layers).kept)


def snapshots_in(config: EngineConfig, kept: KeptBytes, context: int, memory: int | None) -> int:
    """Return the number of state snapshots for a device that supports them. Default: one for each row, in at most a
    quarter of `memory` bytes after the rows' states, and without the blocks of one full-length request. memory None:
    the number of blocks is set. Without cached prefixes there are a few for the states behind shared prompts.
    """
    if not kept.row:
        return 0
    asked, most = config.state_snapshots, config.max_rows
    if not boundary_tokens(config, context):
        asked, most = 0, min(_PROMPT_STATES, config.max_rows)
    if asked or memory is None:
        return asked or most
    left = memory - config.max_rows * kept.row
    spare = left - _blocks_of_one(config, context) * kept.block
    return min(most, max(0, min(left // 4, spare)) // kept.snapshot)


def why_no_prefixes(config: EngineConfig, model: ModelConfig, context: int) -> str:
    """Say why a model with recurrent states has no prefix cache although it is requested."""
    why = "no snapshot of one has room"
    if not has_boundaries(config, context):
        why = f"with a snapshot every {snapshot_tokens(config)} tokens a context of {context} has none to go on from"
    return f"{model.architecture} keeps recurrent states, and {why}"


def _blocks_of_one(config: EngineConfig, context: int) -> int:
    """Return the blocks of one request of full length, and the null block."""
    return ceil_div(context, config.block_size) + 1


def blocks_in(memory: int, config: EngineConfig, kept: KeptBytes, context: int, snapshots: int = 0) -> int:
    """Return the KV blocks that fit into `memory` bytes beside the states of rows and snapshots, including the null
    block, and at most what all rows need at full length. Blocks of a model without attention take no memory: 0 if
    the states don't fit.
    """
    most = config.max_rows * ceil_div(context, config.block_size) + 1
    left = memory - state_bytes_held(config, kept, snapshots)
    if not kept.block:
        return 0 if left < 0 else most
    return min(most, max(0, left) // kept.block)


def check_blocks(blocks: int, config: EngineConfig, context: int, kept: KeptBytes, snapshots: int = 0) -> None:
    """Raise ConfigError if not even one row of full length fits the pool."""
    needed = _blocks_of_one(config, context)
    if blocks < needed and not config.num_blocks:
        states = state_bytes_held(config, kept, snapshots) >> 20
        also = f" and {snapshots} snapshots of states" if snapshots else ""
        beside = f" beside the states of {config.max_rows} rows{also}, which take {states} MiB" if kept.row else ""
        shorter = blocks > 1 or not kept.row  # a context that would fit
        counted = (
            ("context_length", shorter), ("max_rows", kept.row), ("state_snapshots", snapshots),
            ("draft_tokens", kept.holds_drafts),
        )  # fmt: skip
        settings = " or ".join(config.spelling(name) for name, counts in counted if counts)
        raise ConfigError(
            f"memory holds {blocks} KV blocks{beside}; one request of {context} tokens needs {needed}: "
            f"set {settings} to less"
        )


def state_bytes_held(config: EngineConfig, kept: KeptBytes, snapshots: int) -> int:
    """Return the bytes of the states of all rows and snapshots."""
    return config.max_rows * kept.row + snapshots * kept.snapshot


def ring_layout(config: EngineConfig, model: ModelConfig, context: int, forced: int = 0) -> RingLayout:
    """Return the sizes of the rings: `run_ahead` + 2 slots. forced: drafts of a row with a grammar.

    A bulk slot has room for any launch's chunks, the largest admission record, and a few more without a cached prefix
    or penalties.
    """
    largest = largest_record_words(model.vocab_size, context, ceil_div(context, config.block_size))
    drafts = max(most_drafts(config), forced)
    largest += context if config.drafter == "ngram" else 0  # its token history
    ordinary = largest_record_words(model.vocab_size, 0, 0)
    tokens = config.max_prefill_tokens + config.max_rows  # query tokens of a launch; a chunk has one more word
    return RingLayout(
        slots=config.run_ahead + 2,
        plan_words=PLAN_WORDS,
        bulk_words=tokens + largest + _RECORDS * ordinary,
        rows=config.max_rows,
        max_top=MAX_TOP_LOGPROBS,
        drafts=drafts,
        prompt_tokens=tokens + config.max_rows * drafts,
    )


def forced_drafts(config: EngineConfig, model: ModelConfig) -> int:
    """Return the most drafts of a row with a grammar in a launch, if grammars are followed. A row with a recurrent
    state needs a drafter, which makes room for drafts in its slot.
    """
    return most_drafts(config) or (MOST_DRAFTS if config.draft_forced and not state_bytes(model) else 0)


def most_drafts(config: EngineConfig) -> int:
    """Return the most drafts of a row and launch from a drafter."""
    if config.drafter == "none":
        return 0
    return MOST_DRAFTS if config.draft_tokens == AUTO_DRAFTS else config.draft_tokens


def make_scheduler(
    config: EngineConfig,
    model: ModelConfig,
    blocks: int,
    context: int,
    draft_rows: int = 0,
    forced: int = 0,
    draft_step: float = 0.0,
    snapshots: int = 0,
) -> Scheduler:
    """Make the scheduler with its rows, pool and ledger, for a model that passed `check_model`. draft_rows: see
    `SchedulerLimits`. forced: drafts of a row with a grammar. draft_step, snapshots: see `MadeOnDevice`.
    """
    limits = SchedulerLimits(
        context_length=context,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        prefill_chunk=config.prefill_chunk,
        max_prefill_tokens=config.max_prefill_tokens,
        mixed_prefill_tokens=config.mixed_prefill_tokens,
        mixed_graph_tokens=MOST_MIXED_TOKENS if config.device == "cuda" else 0,
        plan_words=PLAN_WORDS,
        bulk_words=ring_layout(config, model, context, forced).bulk_words,
        penalty_slots=config.penalty_slots,
        prefix_cache=config.prefix_cache,
        drafts=most_drafts(config),
        draft_rows=draft_rows,
        forced_drafts=forced,
        history=config.drafter == "ngram",
        guesses_along_masks=config.drafter == "ngram",
        has_state=state_bytes(model) > 0,
        snapshots=snapshots,
        snapshot_tokens=boundary_tokens(config, context) if snapshots else 0,
        state_unit=_STATE_UNIT if config.device == "cuda" else 1,
    )
    ledger: Ledger[Deferred] = Ledger(config.run_ahead, config.run_ahead_tokens, config.counters_from)
    rows = Rows(config.max_rows, MAX_STOP_IDS, context, epoch=config.counters_from)
    adapts = config.drafter != "none" and config.draft_tokens == AUTO_DRAFTS
    choice = _choice(draft_rows, draft_step) if adapts else None
    return Scheduler(limits, rows, BlockPool(blocks, config.block_size), ledger, choice)


def _choice(draft_rows: int, draft_step: float) -> DraftChoice:
    """Return the choice of each launch's number of drafts, if automatic. draft_rows, draft_step: see
    `make_scheduler`.
    """
    costs = msgspec.json.decode(DRAFT_COSTS.read_bytes(), type=DraftCosts)
    if draft_rows:
        return ChoiceByForms(costs, draft_step)
    return ChoiceOfAHead(costs, draft_step) if draft_step else ChoiceByAcceptance(costs)


def sampled_vocab(config: EngineConfig, model: ModelConfig) -> int:
    """Return the bound of ids that may be sampled. The vocabulary beyond the tokenizer's ids and end tokens is
    padding.
    """
    if not config.tokenizer_vocab:
        return model.vocab_size
    return min(model.vocab_size, max(config.tokenizer_vocab, *(token_id + 1 for token_id in model.eos_token_ids), 1))
