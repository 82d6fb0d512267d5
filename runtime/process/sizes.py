"""Chooses unset sizes of launches by device and model. Pure; decision 0051 says why.

On a CPU they are fixed, except for rows whose recurrent states would exceed a share of its cache. On a GPU they follow
from its memory and the weights' bytes. A size that is set never changes, and the others are chosen to fit it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from runahead.runtime.rounding import ceil_div
from runahead.runtime.wire.engine_config import (
    AUTO_RUN_AHEAD,
    FOUND_OUT,
    EngineConfig,
    bounds_of_a_chunk,
    rows_beside,
)

_SNAPSHOT_TOKENS: Final = 512  # between two boundaries with a snapshot, by default


def snapshot_tokens(config: EngineConfig) -> int:
    """Return the tokens between two boundaries with a snapshot of a row's state."""
    blocks = config.state_snapshot_blocks or _SNAPSHOT_TOKENS // config.block_size
    return blocks * config.block_size


def has_boundaries(config: EngineConfig, context: int) -> bool:
    """Return whether a request may begin behind a boundary with a snapshot: it may be longer than the first one, with
    at most one token less than the context."""
    return snapshot_tokens(config) < context - 1


def boundary_tokens(config: EngineConfig, context: int) -> int:
    """Return the tokens between two boundaries with a snapshot, if cached prefixes are found; else 0."""
    return snapshot_tokens(config) if config.prefix_cache and has_boundaries(config, context) else 0


def device_boundary_tokens(config: EngineConfig, context: int) -> int:
    """Return the same for a device's program, which does not accept 0: then more tokens than a row can have, so that no
    row reaches a boundary."""
    return boundary_tokens(config, context) or (ceil_div(context, config.block_size) + 1) * config.block_size


NAMES: Final = (
    "run_ahead", "max_rows", "prefill_chunk", "max_prefill_tokens", "mixed_prefill_tokens", "run_ahead_tokens",
)  # fmt: skip
GIB: Final = 1 << 30

_CPU: Final = {"run_ahead": 2, "max_rows": 64, "prefill_chunk": 128, "max_prefill_tokens": 256, "run_ahead_tokens": 512}

# Fastest for the measured GPU and model, and the maximum elsewhere.
_MOST_ROWS: Final = 256
_MOST_TOKENS: Final = 8192
_CHUNK: Final = 2048
_LEAST_ROWS: Final = 8
_LEAST_TOKENS: Final = 512  # up to which a launch with prompts is one graph
# A launch has _MOST_TOKENS on a GPU with at least this memory, for at most this many bytes of weights. A smaller GPU is
# assumed slower, and larger weights mean more work a token.
_FULL_MEMORY: Final = 64 * GIB
_FULL_WEIGHTS: Final = 16 * GIB
# With this many bytes of weights a step takes milliseconds: one launch ahead covers the host's work, and an arriving
# prompt does not wait for a second one.
_ONE_AHEAD_WEIGHTS: Final = 8 * GIB
# Floating-point operations a second of launches with prompts on such a GPU, two for each 16-bit weight and token. 8B
# reached 630e12 on one H200: 1,342 prompt tokens beside 51 rows in 34 ms.
_PROMPT_FLOPS: Final = 590e12
_BYTES_OF_A_WEIGHT: Final = 2
_TOKEN_STEP: Final = 64
_ROW_TOKENS: Final = 1024  # of each row that should fit the KV cache at once, if its context is as long
_POOL_FRACTION: Final = 0.85  # of the memory without weights
_STATE_FRACTION: Final = 0.5  # of a CPU's cache, for the states of all rows


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. memory: total bytes."""

    name: str
    memory: int


@dataclass(frozen=True, slots=True)
class Cpu:
    """A CPU. cache: bytes for KV blocks and states."""

    cache: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's sizes. weight_bytes: in the served dtype. token_bytes: of keys and values, a drafter's included.
    context: most tokens of a request. row_bytes: of a row's recurrent state. draft_weight_bytes: of a drafter.
    prompt_bytes: of weights in a prompt's products, in 16 bits if weights are quantized; 0: weight_bytes.
    """

    weight_bytes: int
    token_bytes: int
    context: int
    row_bytes: int = 0
    draft_weight_bytes: int = 0
    prompt_bytes: int = 0

    @property
    def all_weight_bytes(self) -> int:
        return self.weight_bytes + self.draft_weight_bytes


def with_sizes(config: EngineConfig, machine: Gpu | Cpu, model: ModelSize) -> tuple[EngineConfig, str]:
    """Return the settings with every size, and the reason for the chosen ones in words.

    Settings that pass `check_config` stay consistent.
    """
    asked = {name: getattr(config, name) for name in NAMES if getattr(config, name) != _unset(name)}
    by_prompts = model.prompt_bytes or model.weight_bytes
    by_prompts += model.draft_weight_bytes if config.drafter == "model" else 0
    best = (
        _on_a_cpu(machine, model)
        if isinstance(machine, Cpu)
        else _on_a_gpu(machine, model, by_prompts, config.token_gap_ms)
    )
    sizes = _fitting(config, best | asked, asked)
    found = [name for name in NAMES if name not in asked]
    why = _why(machine, model, sizes, asked) if found else "all of them were set"
    if asked and found:
        why += "; set: " + ", ".join(asked)
    return msgspec.structs.replace(config, **sizes), why


def _unset(name: str) -> int:
    """Return a setting's value for automatic."""
    return AUTO_RUN_AHEAD if name == "run_ahead" else FOUND_OUT


def _on_a_cpu(cpu: Cpu, model: ModelSize) -> dict[str, int]:
    if not model.row_bytes:
        return dict(_CPU)
    rows = int(cpu.cache * _STATE_FRACTION) // model.row_bytes
    return _CPU | {"max_rows": min(_CPU["max_rows"], max(1, rows))}


def _on_a_gpu(gpu: Gpu, model: ModelSize, by_prompts: int, gap_ms: int) -> dict[str, int]:
    """Choose sizes for a GPU. by_prompts: bytes of the weights used for a prompt's token: including a draft model's,
    but not a head's, of which it uses one or two matrices. gap_ms: `token_gap_ms`.
    """
    of_gpu = min(1.0, gpu.memory / _FULL_MEMORY)
    speed = of_gpu * min(1.0, _FULL_WEIGHTS / max(1, by_prompts))
    tokens = max(_LEAST_TOKENS, _power_of_two(_MOST_TOKENS * speed))
    in_gap = gap_ms / 1000 * _PROMPT_FLOPS * of_gpu / (2 * max(1, by_prompts) / _BYTES_OF_A_WEIGHT)
    mixed = max(_LEAST_TOKENS, int(in_gap) // _TOKEN_STEP * _TOKEN_STEP)
    room = max(0, gpu.memory - model.all_weight_bytes) * _POOL_FRACTION
    row_bytes = min(model.context, _ROW_TOKENS) * model.token_bytes + model.row_bytes
    rows = _power_of_two(room / row_bytes) if row_bytes else _MOST_ROWS
    return {
        "run_ahead": 1 if model.weight_bytes >= _ONE_AHEAD_WEIGHTS else 2,
        "max_rows": min(_MOST_ROWS, max(_LEAST_ROWS, rows)),
        "prefill_chunk": min(_CHUNK, tokens),
        "max_prefill_tokens": tokens,
        "mixed_prefill_tokens": mixed,
    }


def _fitting(config: EngineConfig, sizes: dict[str, int], asked: dict[str, int]) -> dict[str, int]:
    """Return set sizes unchanged, and the others so that nothing contradicts them."""
    if "prefill_chunk" not in asked:
        most = [sizes["prefill_chunk"], *(asked[name] for name in bounds_of_a_chunk(config) if name in asked)]
        blocks = max(1, min(most) // config.block_size)
        sizes["prefill_chunk"] = blocks * config.block_size
    if "max_rows" not in asked:
        most_rows = [sizes["max_rows"], rows_beside(sizes["prefill_chunk"], config.block_size)]
        sizes["max_rows"] = min([*most_rows, config.num_blocks - 1] if config.num_blocks else most_rows)
    if "max_prefill_tokens" not in asked:
        sizes["max_prefill_tokens"] = max(sizes["max_prefill_tokens"], sizes["prefill_chunk"])
    if "mixed_prefill_tokens" not in asked:
        most_beside = sizes["max_prefill_tokens"]
        sizes["mixed_prefill_tokens"] = min(sizes.get("mixed_prefill_tokens", most_beside), most_beside)
    if "run_ahead_tokens" not in asked:
        full = sizes["max_prefill_tokens"] * (1 + sizes["run_ahead"])  # every launch of the chain may be full
        on_cpu = max(_CPU["run_ahead_tokens"], sizes["prefill_chunk"], sizes["max_prefill_tokens"])
        sizes["run_ahead_tokens"] = on_cpu if config.device == "cpu" else full
    return sizes


def _why(machine: Gpu | Cpu, model: ModelSize, sizes: dict[str, int], asked: dict[str, int]) -> str:
    if isinstance(machine, Cpu):
        if not model.row_bytes or "max_rows" in asked:
            return "what a CPU gets"
        return f"what a CPU gets, with rows whose states take half of {machine.cache / GIB:.0f} GiB at most"
    weights = f"weights of {model.all_weight_bytes / GIB:.1f} GiB"
    if model.draft_weight_bytes:
        weights += f", {model.draft_weight_bytes / GIB:.1f} GiB of them of what drafts"
    return f"by the rule for GPUs of {machine.memory / GIB:.0f} GiB and {weights}"


def _power_of_two(number: float) -> int:
    """Return the largest power of two up to this number, at least 1."""
    return 1 << max(0, int(number).bit_length() - 1)
