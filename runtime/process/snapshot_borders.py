"""Where along a request snapshots of recurrent states are kept."""

from __future__ import annotations

from typing import Final

from runahead.runtime.rounding import ceil_div
from runahead.runtime.wire.engine_config import EngineConfig

_SNAPSHOT_TOKENS: Final = 512  # between two borders with a snapshot, unless a setting says so


def snapshot_tokens(config: EngineConfig) -> int:
    """Tokens from one border with a snapshot of a row's state to the next."""
    blocks = config.state_snapshot_blocks or _SNAPSHOT_TOKENS // config.block_size
    return blocks * config.block_size


def has_borders(config: EngineConfig, context: int) -> bool:
    """A request may begin behind a border with a snapshot: its tokens, one fewer than the context at most, go on beyond
    the first one."""
    return snapshot_tokens(config) < context - 1


def border_tokens(config: EngineConfig, context: int) -> int:
    """Tokens from one border with a snapshot of a row's state to the next, where cached prefixes are found; else 0."""
    return snapshot_tokens(config) if config.prefix_cache and has_borders(config, context) else 0


def device_border_tokens(config: EngineConfig, context: int) -> int:
    """The same for a device's program, which takes no 0: then more tokens than a row can have, so that no row comes to
    a border."""
    return border_tokens(config, context) or (ceil_div(context, config.block_size) + 1) * config.block_size
