"""The engine's settings, each declared once, and its whole start configuration.

The front end derives flags, environment variables, file keys, help texts and the table of `docs/settings.md` from these
declarations; the struct crosses the socket unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, Literal

import msgspec

from runahead.runtime.plan import APPEND_WORDS, CHUNK_WORDS, HEADER_WORDS, PLAN_WORDS
from runahead.runtime.rounding import ceil_div
from runahead.runtime.wire.setting import setting, settings_of, shown

SERIAL, AUTO_RUN_AHEAD = 0, -1
AUTO_DRAFTS = 0
FOUND_OUT = 0  # chosen at the start: `runahead.runtime.process.sizes`
AUTO_SNAPSHOTS = 0
MOST_DRAFTS = 7  # a decode launch's kernels take up to eight query tokens of a row
LAUNCH_TIMEOUT_S = 120.0
# Tokens of the longest request. Positions are 32-bit words in columns, on the device and in the random numbers'
# counter; only this bounds them.
MAX_CONTEXT = 1 << 22

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
FP8_CAPABILITY: Final = (8, 9)  # the least of a GPU that converts and multiplies FP8
KvDtype = Literal["auto", "fp8"]


class ConfigError(ValueError):
    """An invalid setting or combination. The sentence names the settings."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A field is a setting with name, type, bounds, description and default; `runahead.runtime.wire.setting` lists
    further attributes.
    """

    served_name: Annotated[str, setting("name that clients see (default: the folder's or file's)", group="Model")] = ""
    load_format: Annotated[
        Literal["auto", "dummy"], setting("auto: the checkpoint's; dummy: random weights of the configured shape")
    ] = "auto"
    device: Annotated[
        DeviceName, setting("device to run on; auto: a working GPU, else the CPU", group="Device", main=True)
    ] = "auto"
    dtype: Annotated[
        DtypeName, setting("dtype of weights and activations; auto: float32 on the CPU, the checkpoint's on CUDA")
    ] = "auto"
    quantize: Annotated[
        Literal["none", "fp8", "int4"], setting("quantize matrices at load: fp8, or int4 in groups of 128")
    ] = "none"
    kv_dtype: Annotated[
        KvDtype, setting("dtype of keys and values; auto: as dtype; fp8: e4m3 with a scale per KV head")
    ] = "auto"
    tensor_parallel: Annotated[
        int, setting("tensor-parallel ranks, each a process; on CUDA each with a GPU", ge=1, le=8)
    ] = 1
    threads: Annotated[
        int, setting("torch threads of a CPU rank; 0: an equal part of all cores but one", ge=0, le=1024)
    ] = 0
    kernel_cache: Annotated[
        str,
        setting(
            "folder of compiled GPU kernels, kept for the next start; empty: TRITON_CACHE_DIR or ~/.triton/cache",
            metavar="FOLDER",
        ),
    ] = ""
    run_ahead: Annotated[
        int,
        setting(
            "maximum number of launches queued ahead of the committed one; serial: none; auto: by model",
            ge=AUTO_RUN_AHEAD,
            le=4,
            group="Launches and memory",
            main=True,
            words={"auto": AUTO_RUN_AHEAD, "serial": SERIAL},
        ),
    ] = AUTO_RUN_AHEAD
    run_ahead_tokens: Annotated[
        int,
        setting(
            "maximum prompt tokens in all uncommitted launches and the next one; 0: by device and model",
            ge=FOUND_OUT,
            le=1 << 20,
        ),
    ] = FOUND_OUT
    max_rows: Annotated[
        int, setting("requests that decode together; 0: by device and model", ge=FOUND_OUT, le=1024, main=True)
    ] = FOUND_OUT
    max_queue: Annotated[int, setting("maximum number of waiting requests", ge=1, le=1 << 20)] = 1024
    context_length: Annotated[
        int, setting("tokens of a prompt and its completion; 0: the model's limit", ge=0, le=MAX_CONTEXT, main=True)
    ] = 0
    block_size: Annotated[int, setting("tokens of a KV block, a power of two", ge=8, le=256)] = 16
    # Including the null block.
    num_blocks: Annotated[int, setting("KV blocks; 0: as many as memory allows", ge=0, le=1 << 24)] = 0
    prefill_chunk: Annotated[
        int,
        setting(
            "prompts are split at multiples of this number of tokens, and at snapshots of their state; "
            "0: by device and model",
            ge=FOUND_OUT,
            le=1 << 14,
        ),
    ] = FOUND_OUT
    max_prefill_tokens: Annotated[
        int, setting("maximum prompt tokens of a launch; 0: by device and model", ge=FOUND_OUT, le=1 << 15)
    ] = FOUND_OUT
    mixed_prefill_tokens: Annotated[
        int,
        setting(
            "maximum prompt tokens of a launch with decode rows, or one chunk; 0: from token_gap_ms",
            ge=FOUND_OUT,
            le=1 << 15,
        ),
    ] = FOUND_OUT
    token_gap_ms: Annotated[
        int, setting("target for the time between tokens while prompts run, milliseconds", ge=1, le=10_000)
    ] = 40
    prefix_cache: Annotated[bool, setting("prompts share the KV blocks of prefixes computed before")] = True
    state_snapshots: Annotated[
        int,
        setting("cached snapshots of recurrent states; 0: one per row, if memory allows", ge=0, le=1 << 16),
    ] = AUTO_SNAPSHOTS
    state_snapshot_blocks: Annotated[
        int, setting("KV blocks between two snapshots of a request; 0: 512 tokens", ge=0, le=1 << 16)
    ] = AUTO_SNAPSHOTS
    penalty_slots: Annotated[
        int, setting("maximum number of running requests with penalties; 0: penalties are refused", ge=0, le=1024)
    ] = 16
    drafter: Annotated[
        Literal["none", "ngram", "eagle", "mtp", "model"],
        setting(
            "drafter for speculative decoding; ngram: prompt lookup in prompt and completion; eagle: a head trained "
            "for the model; mtp: the checkpoint's head; model: a smaller model with the same vocabulary",
            group="Drafts",
        ),
    ] = "none"
    draft_model: Annotated[
        str,
        setting("draft head or model, for drafter eagle or model; empty: the bundled model's head", metavar="FOLDER"),
    ] = ""
    draft_tokens: Annotated[
        int,
        setting(
            "draft tokens per request and launch; auto: the number that pays off",
            ge=AUTO_DRAFTS,
            le=MOST_DRAFTS,
            words={"auto": AUTO_DRAFTS},
        ),
    ] = AUTO_DRAFTS
    launch_timeout_s: Annotated[
        float,
        setting(
            "seconds without progress of a launch, a request or the loop after which the engine stops",
            gt=0,
            le=604_800,
            group="Processes",
        ),
    ] = LAUNCH_TIMEOUT_S
    log_interval: Annotated[
        int, setting("launches between logged snapshots; 0: never", ge=0, le=1 << 30, group="Logs")
    ] = 0
    log_mode: Annotated[
        Literal["events", "barrier"],
        setting("events: without waiting; barrier: drain the chain before a logged launch"),
    ] = "events"
    nvtx: Annotated[bool, setting("name the loop's stages for a profiler; needs a torch for CUDA")] = False
    # Seeded delays, and poison in released memory.
    jitter_seed: Annotated[int, setting("test mode of the CPU device", ge=0, le=(1 << 63) - 1, hidden=True)] | None = (
        None
    )
    # Permanent counters (launches, epochs of rows, front ends, their handles and calls) begin after this number.
    counters_from: Annotated[int, setting("test mode: where counters begin", ge=0, le=1 << 62, hidden=True)] = 0
    # For comparing engines with and without drafts.
    draft_forced: Annotated[bool, setting("test mode: false: what structures force is not drafted", hidden=True)] = True


class EngineConfig(EngineSettings, frozen=True, kw_only=True):
    """The engine's start configuration.

    model: path of a checkpoint folder or file. spelled: settings' names in messages, such as the flag or variable that
        was used; others use the field's name.
    tokenizer_vocab: the tokenizer's highest id plus one; 0: no tokenizer, or unknown.
    """

    model: str
    tokenizer_vocab: int = 0
    spelled: dict[str, str] = {}

    def spelling(self, name: str) -> str:
        """Return a setting's name for messages."""
        return self.spelled.get(name, name)


_SETTINGS: Final = settings_of(EngineSettings)
Spelling = Callable[[str], str]  # maps a setting to its name in messages


def check_config(config: EngineSettings, spelling: Spelling = str) -> None:
    """Raise ConfigError for the first invalid setting or contradictory pair.

    Sizes chosen at the start contradict nothing.
    """
    for name, declared in _SETTINGS.items():
        try:
            declared.check(getattr(config, name))
        except ValueError as error:
            raise ConfigError(f"{spelling(name)} {error}") from error

    def given(name: str) -> str:
        return f"{spelling(name)} ({getattr(config, name)})"

    if not config.served_name.isprintable():
        raise ConfigError(
            f"the model's name {config.served_name!r} has characters that can't be shown: set "
            f"{spelling('served_name')} to one without"
        )
    _check_lengths(config, spelling, given)
    _check_pairs(config, spelling, given)
    if config.num_blocks:
        _check_pool(config, config.num_blocks - 1, spelling, given)  # one of them is the null block


def rows_beside(chunk: int, block_size: int) -> int:
    """Return the rows that a launch's plan can name beside a chunk of this many tokens; less than 1 if the chunk does
    not fit.
    """
    return PLAN_WORDS - HEADER_WORDS - 2 - CHUNK_WORDS - APPEND_WORDS * (chunk // block_size)


def bounds_of_a_chunk(config: EngineSettings) -> tuple[str, ...]:
    """Return the token settings that bound a chunk."""
    return ("max_prefill_tokens",) if config.run_ahead == SERIAL else ("max_prefill_tokens", "run_ahead_tokens")


def _check_lengths(config: EngineSettings, spelling: Spelling, given: Spelling) -> None:
    if config.context_length == 1:
        raise ConfigError(f"{given('context_length')} must be at least 2: a prompt token and a generated one")
    if config.block_size & (config.block_size - 1):
        raise ConfigError(f"{spelling('block_size')} must be a power of two, and is {config.block_size}")
    if config.prefill_chunk % config.block_size:
        raise ConfigError(f"{given('prefill_chunk')} must be a multiple of {given('block_size')}")
    for name in bounds_of_a_chunk(config):
        if 0 < getattr(config, name) < config.block_size:
            raise ConfigError(
                f"{given(name)} must be at least {given('block_size')}: a prompt is cut at whole KV blocks, and none "
                "could ever be prefilled"
            )
    blocks = config.prefill_chunk // config.block_size
    if rows_beside(config.prefill_chunk, config.block_size) < max(1, config.max_rows):
        raise ConfigError(
            f"a {spelling('prefill_chunk')} of {config.prefill_chunk} tokens is {blocks} blocks of {config.block_size} "
            f"({spelling('block_size')}), more than a launch plan can name beside {max(1, config.max_rows)} rows "
            f"({spelling('max_rows')})"
        )


def _check_pairs(config: EngineSettings, spelling: Spelling, given: Spelling) -> None:
    """Refuse pairs of settings that exclude each other or leave one without effect. Device auto contradicts nothing
    until the device is known.
    """
    cuda = f"{spelling('device')} cuda"
    if config.device == "cpu" and config.dtype not in ("auto", "float32"):
        raise ConfigError(
            f"{spelling('device')} cpu computes in float32; {spelling('dtype')} {config.dtype} can't be combined with "
            "it"
        )
    if 0 < config.max_prefill_tokens < config.prefill_chunk:
        raise ConfigError(
            f"{given('max_prefill_tokens')} must be at least {given('prefill_chunk')}, or no prompt could ever be "
            "prefilled"
        )
    if config.jitter_seed is not None and config.device == "cuda":
        raise ConfigError(
            f"{spelling('jitter_seed')} is a test mode of the CPU device and can't be combined with {cuda}"
        )
    if config.kernel_cache and config.device == "cpu":
        raise ConfigError(
            f"{spelling('kernel_cache')} must be empty with {spelling('device')} {config.device}, for which no kernels "
            f"are compiled, and is {shown(config.kernel_cache)}"
        )
    if config.threads and config.device == "cuda":
        raise ConfigError(f"{given('threads')} are the CPU device's and have no effect with {cuda}")
    if config.run_ahead != SERIAL and 0 < config.run_ahead_tokens < config.prefill_chunk:
        asked = config.max_prefill_tokens
        though = f", though launches may carry {asked} prompt tokens ({spelling('max_prefill_tokens')})"
        raise ConfigError(
            f"{given('run_ahead_tokens')} must be at least {given('prefill_chunk')}, or a launch with a whole chunk of "
            f"a prompt could never be queued behind another{though if asked else ''}"
        )
    if config.drafter == "eagle" and not config.draft_model:
        raise ConfigError(
            f"{spelling('drafter')} eagle needs a head that was trained for the model: {spelling('draft_model')} names "
            "its folder, and may be left out with the bundled model alone"
        )
    if config.drafter == "model" and not config.draft_model:
        raise ConfigError(
            f"{spelling('drafter')} model needs a smaller model: {spelling('draft_model')} names its folder or file"
        )
    if config.draft_model and config.drafter not in ("eagle", "model"):
        why = "whose head is in the model's checkpoint" if config.drafter == "mtp" else "which has no weights"
        raise ConfigError(
            f"{spelling('draft_model')} must be empty with {spelling('drafter')} {config.drafter}, {why}, and is "
            f"{shown(config.draft_model)}"
        )
    if config.draft_tokens != AUTO_DRAFTS and config.drafter == "none":
        raise ConfigError(f"{given('draft_tokens')} has no effect with {spelling('drafter')} none: nothing is guessed")
    if not config.draft_forced and config.drafter != "none":
        raise ConfigError(
            f"{spelling('draft_forced')} is a test mode of engines that draft nothing and can't be combined with "
            f"{spelling('drafter')} {config.drafter}"
        )
    for name in ("state_snapshots", "state_snapshot_blocks"):
        if getattr(config, name) != AUTO_SNAPSHOTS and not config.prefix_cache:
            raise ConfigError(
                f"{given(name)} has no effect without {spelling('prefix_cache')}: no prefix is looked for"
            )
    if config.log_mode == "barrier" and not config.log_interval:
        raise ConfigError(
            f"{spelling('log_mode')} barrier has no effect with {spelling('log_interval')} 0: no launch is ever logged"
        )


def _check_pool(config: EngineSettings, blocks: int, spelling: Spelling, given: Spelling) -> None:
    """Check the pool. blocks: without the null block."""
    if blocks < 1:
        raise ConfigError(
            f"{spelling('num_blocks')} must be at least 2 (one is the null block), and is {config.num_blocks}"
        )
    if config.max_rows > blocks:
        raise ConfigError(
            f"{given('max_rows')} is more than a pool of {config.num_blocks} ({spelling('num_blocks')}) can serve: "
            "each row needs at least one KV block, and one block is the null block"
        )
    needed = ceil_div(config.context_length - 1, config.block_size)  # the last token is never forwarded
    if needed > blocks:
        raise ConfigError(
            f"{given('context_length')} takes {needed} KV blocks of {config.block_size} ({spelling('block_size')}), "
            f"and {given('num_blocks')} leaves {blocks} beside the null block: no request could fill it"
        )


class TuneOrder(msgspec.Struct, frozen=True):
    """What to tune. rows: of decode launches, each 1 to 64. seconds: no further tiling is tried after this time."""

    config: EngineConfig
    rows: tuple[int, ...]
    seconds: float
