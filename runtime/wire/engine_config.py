"""Everything the engine is started with, in one frozen struct. The front end makes it from its settings."""

from __future__ import annotations

import msgspec

from runahead.runtime.plan import APPEND_WORDS, CHUNK_WORDS, HEADER_WORDS, PLAN_WORDS

SERIAL = 0
LAUNCH_TIMEOUT_S = 120.0
# Tokens of the longest request. Positions are 32-bit words in columns, on the device and in the counter of the random
# numbers; what bounds them is this alone.
MAX_CONTEXT = 1 << 22


class ConfigError(ValueError):
    """A setting, or two that can't go together. The sentence names the setting."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """model: a checkpoint folder. device: cpu or cuda. run_ahead: 0 (serial) to 4.

    dtype: auto (float32 on the CPU, the checkpoint's own on CUDA), float32, bfloat16, float16.
    load_format: auto (safetensors) or dummy (random weights of the configured shape).
    context_length: 0 takes the model's own.
    num_blocks: KV blocks, the null block included; 0 sizes the pool from memory.
    prefill_chunk: prompts are cut at multiples of this many tokens.
    max_prefill_tokens: prompt tokens a launch may carry, at least `prefill_chunk`.
    run_ahead_tokens: a launch with prompt tokens is not queued behind uncommitted ones if together they carry more.
    prefix_cache: full blocks are found again by their content.
    penalty_slots: rows that may have penalties at a time; 0 refuses penalties.
    log_interval: a snapshot of the engine is logged every so many launches; 0: never.
    log_mode: events (from marks that have passed, no barrier) or barrier (the chain drains before the logged launch).
    threads: torch threads of the CPU device; 0 leaves one core to the host.
    launch_timeout_s: the engine stops if launches in flight, the requests or its own loop have not come further for so
    long.
    jitter_seed: a test mode of the host device: seeded delays, and poison in everything that is given back.
    counters_from: a test mode: what counts up for as long as the service runs (launches, epochs of rows, front ends,
    their handles and calls) begins after this number.
    """

    model: str
    served_name: str = ""
    device: str = "cpu"
    dtype: str = "auto"
    load_format: str = "auto"
    run_ahead: int = 2
    max_rows: int = 64
    max_queue: int = 1024
    context_length: int = 0
    block_size: int = 16
    num_blocks: int = 0
    prefill_chunk: int = 128
    max_prefill_tokens: int = 256
    run_ahead_tokens: int = 512
    prefix_cache: bool = True
    penalty_slots: int = 16
    log_interval: int = 0
    log_mode: str = "events"
    threads: int = 0
    launch_timeout_s: float = LAUNCH_TIMEOUT_S
    jitter_seed: int | None = None
    counters_from: int = 0


def check_config(config: EngineConfig) -> None:
    """Raises ConfigError for the first setting, or pair of settings, that can't be."""
    bounds = {
        "run_ahead": (0, 4),
        "max_rows": (1, 512),
        "max_queue": (1, 1 << 20),
        "block_size": (8, 256),
        "num_blocks": (0, 1 << 24),
        "prefill_chunk": (8, 1 << 14),
        "max_prefill_tokens": (8, 1 << 15),
        "run_ahead_tokens": (1, 1 << 20),
        "context_length": (0, MAX_CONTEXT),
        "threads": (0, 1024),
        "penalty_slots": (0, 512),
        "log_interval": (0, 1 << 30),
        "counters_from": (0, 1 << 62),
    }
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if not low <= value <= high:
            raise ConfigError(f"{name} must be between {low} and {high}, and is {value}")
    if not config.launch_timeout_s > 0:
        raise ConfigError(f"launch_timeout_s must be more than 0, and is {config.launch_timeout_s}")
    if config.log_mode not in ("events", "barrier"):
        raise ConfigError(f"log_mode must be events or barrier, and is {config.log_mode!r}")
    if config.device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, and is {config.device!r}")
    if config.dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype must be auto, float32, bfloat16 or float16, and is {config.dtype!r}")
    if config.load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format must be auto or dummy, and is {config.load_format!r}")
    if config.block_size & (config.block_size - 1):
        raise ConfigError(f"block_size must be a power of two, and is {config.block_size}")
    if config.prefill_chunk % config.block_size:
        raise ConfigError(
            f"prefill_chunk ({config.prefill_chunk}) must be a multiple of block_size ({config.block_size})"
        )
    blocks = config.prefill_chunk // config.block_size
    words = HEADER_WORDS + config.max_rows + 2 + CHUNK_WORDS + APPEND_WORDS * blocks
    if words > PLAN_WORDS:
        raise ConfigError(
            f"a prefill_chunk of {config.prefill_chunk} tokens is {blocks} blocks of {config.block_size} (block_size), "
            f"more than a launch plan can name beside {config.max_rows} rows (max_rows)"
        )
    _check_pairs(config)


def _check_pairs(config: EngineConfig) -> None:
    """Settings each of which could be, and which together can't: one of them would have no effect, or nothing would."""
    if config.max_prefill_tokens < config.prefill_chunk:
        raise ConfigError(
            f"max_prefill_tokens ({config.max_prefill_tokens}) must be at least prefill_chunk "
            f"({config.prefill_chunk}), or no prompt could ever be prefilled"
        )
    if config.jitter_seed is not None and config.device != "cpu":
        raise ConfigError("jitter_seed is a test mode of the CPU device and can't be combined with device cuda")
    if config.threads and config.device != "cpu":
        raise ConfigError(f"threads ({config.threads}) are the CPU device's and have no effect with device cuda")
    if config.run_ahead != SERIAL and config.run_ahead_tokens < config.prefill_chunk:
        raise ConfigError(
            f"run_ahead_tokens ({config.run_ahead_tokens}) must be at least prefill_chunk ({config.prefill_chunk}), or "
            f"a launch with a whole chunk of a prompt could never be queued behind another, though launches may carry "
            f"{config.max_prefill_tokens} prompt tokens (max_prefill_tokens)"
        )
    if config.log_mode == "barrier" and not config.log_interval:
        raise ConfigError("log_mode barrier has no effect with log_interval 0: no launch is ever logged")
    if config.num_blocks > 1:
        _check_pool(config, config.num_blocks - 1)  # one of them is the null block


def _check_pool(config: EngineConfig, blocks: int) -> None:
    if config.max_rows > blocks:
        raise ConfigError(
            f"max_rows ({config.max_rows}) is more than a pool of {config.num_blocks} (num_blocks) can serve: each row "
            f"holds a KV block of its own, and one block is the null block"
        )
    needed = -(-(config.context_length - 1) // config.block_size)  # the last token is never forwarded
    if needed > blocks:
        raise ConfigError(
            f"context_length ({config.context_length}) takes {needed} KV blocks of {config.block_size} (block_size), "
            f"and num_blocks ({config.num_blocks}) leaves {blocks} beside the null block: no request could fill it"
        )
