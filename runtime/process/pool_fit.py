"""Sizes the KV pool, and handles a start that runs out of memory. Decision 0051 says why.

Beside weights and pool a device needs memory that no formula gives: buffers, workspace of launches without a graph,
graphs. So the largest launches are tried first with a pool of a few blocks, and freed. The pool gets the rest minus an
overhead. If memory still runs out, the start tries once more with a smaller pool, then refuses with a sentence.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import structlog
import torch

from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.memory import KeptBytes, weight_bytes
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig


@dataclass(frozen=True, slots=True)
class DraftingBytes:
    """Bytes of a drafter's weights. block: its bytes in a KV block."""

    weights: int
    block: int


def memory_facts(
    config: EngineConfig, model: Decoder, kept: KeptBytes, blocks: int, snapshots: int = 0,
    drafting: DraftingBytes | None = None,
) -> dict[str, int]:  # fmt: skip
    """Return the bytes of the model, KV blocks, row states and snapshots by name, and of the pools together, for the
    log. kept: a drafter's included and listed separately. drafting: None without a drafter with weights.
    """
    of_drafter = 0 if drafting is None else blocks * drafting.block
    weights = {"weight_bytes": weight_bytes(model.weights)}
    pools = {
        "kv_bytes": blocks * kept.block - of_drafter,
        "state_bytes": config.max_rows * kept.row,
        "snapshot_bytes": snapshots * kept.snapshot,
    }
    if drafting is not None:
        weights["draft_weight_bytes"] = drafting.weights
        pools["draft_kv_bytes"] = of_drafter
    return {**weights, **pools, "pool_bytes": sum(pools.values())}


TRIAL_BLOCKS: Final = 2  # the null block and one more, the only ones that trial launches write
_MIB: Final = 1 << 20
_OVERHEAD_FRACTION: Final = 0.03  # of the device's memory
_LEAST_OVERHEAD: Final = 768 * _MIB
_SMALLER: Final = (9, 10)  # the second attempt's pool relative to the first one's
# Libraries' messages for a lack of memory: CUDA's driver and libraries, torch's CPU allocator.
_SAYINGS: Final = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "not enough memory")

Built = TypeVar("Built")


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of a device beside weights and KV pool. buffers: permanent. launches: the most that launches without a
    graph take while they run. graphs: all captured ones.
    """

    buffers: int = 0
    launches: int = 0
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.buffers + self.launches + self.graphs

    def by_name(self) -> dict[str, int]:
        """Return the bytes by name, for the log."""
        return {"buffer_bytes": self.buffers, "launch_bytes": self.launches, "graph_bytes": self.graphs}


def overhead(memory: int) -> int:
    """Return the bytes that a start leaves free on a device with this memory: for graphs that the trial does not
    capture, fragmentation, and other processes.
    """
    return max(_LEAST_OVERHEAD, int(memory * _OVERHEAD_FRACTION))


@dataclass(frozen=True, slots=True)
class PoolFit(Generic[Built]):
    """Makes a device with a pool that fits.

    weight_bytes: of the model and a drafter. kept: a drafter's included. snapshots: number of state snapshots. build:
    makes the device with this many blocks. check: raises ConfigError for too small a pool. give_back: returns unused
    memory to the device.
    """

    config: EngineConfig
    weight_bytes: int
    kept: KeptBytes
    snapshots: int
    build: Callable[[int], Built]
    check: Callable[[int], None]
    give_back: Callable[[], None] = lambda: None

    def built(self, blocks: int, needs: Needs | None = None) -> tuple[Built, int]:
        """Make a device, and return it with its number of blocks: as given, or fewer if memory runs out and the number
        is not set. needs: from the trial.

        Raises ConfigError if that does not help.
        """
        found = self._attempt(blocks)
        if isinstance(found, OutOfMemory) and not self.config.num_blocks:
            given, part = _SMALLER
            fewer = blocks * given // part
            structlog.get_logger("engine").warning("memory_ran_out", why=found.why, blocks=blocks, blocks_next=fewer)
            self._check_again(fewer, needs)
            blocks, found = fewer, self._attempt(fewer)
        if isinstance(found, OutOfMemory):
            raise ConfigError(self.refusal(blocks, needs))
        return found, blocks

    def tried(self, trial: Callable[[], Needs]) -> Needs:
        """Run the trial and return its needs. Raises ConfigError if memory runs out."""
        found = _attempt(trial, self.give_back)
        if isinstance(found, OutOfMemory):
            raise ConfigError(self.refusal(TRIAL_BLOCKS, None))
        return found

    def refusal(self, blocks: int, needs: Needs | None) -> str:
        """Return the sentence for insufficient memory. needs: None if the trial itself failed."""
        config, kept, rows = self.config, self.kept, self.config.max_rows
        parts = f"the weights take {_mib(self.weight_bytes)}, {blocks} KV blocks {_mib(blocks * kept.block)}"
        if kept.row:
            parts += f", the states of {rows} rows {_mib(rows * kept.row)}"
        if self.snapshots:
            parts += f", {self.snapshots} snapshots of states {_mib(self.snapshots * kept.snapshot)}"
        if needs is None:
            parts += ", and what launches need beside them does not fit"
        else:
            parts += f", buffers {_mib(needs.buffers + needs.launches)}, graphs {_mib(needs.graphs)}"
        counted = {
            "num_blocks": config.num_blocks and needs is not None,
            "state_snapshots": self.snapshots > 1 or config.state_snapshots > 1,  # 0 would mean automatic
            "draft_tokens": kept.holds_drafts,
            "max_rows": True,
            "max_prefill_tokens": True,
            "context_length": True,
        }
        settings = [config.spelling(name) for name, counts in counted.items() if counts]
        return f"memory ran out: {parts}; set {', '.join(settings[:-1])} or {settings[-1]} to less"

    def _attempt(self, blocks: int) -> Built | OutOfMemory:
        return _attempt(lambda: self.build(blocks), self.give_back)

    def _check_again(self, blocks: int, needs: Needs | None) -> None:
        try:
            self.check(blocks)
        except ConfigError as error:
            raise ConfigError(f"{self.refusal(blocks, needs)} ({error})") from error


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A lack of memory. why: the first line of the error."""

    why: str


def _attempt(build: Callable[[], Built], give_back: Callable[[], None]) -> Built | OutOfMemory:
    """Call `build`. A failed attempt's memory is free when this returns: not even the error's frames hold it."""
    try:
        return build()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        ran_out = OutOfMemory(str(error).split("\n")[0])
    gc.collect()
    give_back()
    return ran_out


@contextmanager
def room_for_weights(weight_bytes: int) -> Iterator[None]:
    """Raise ConfigError if memory runs out while weights are loaded."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"memory ran out while the weights were loaded, which take {_mib(weight_bytes)}: serve a smaller model, or "
            "end other processes"
        ) from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one in its chain, is a lack of memory; it may surface as a failed capture."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(saying in str(error) for saying in _SAYINGS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _mib(size: int) -> str:
    return f"{size // _MIB} MiB"
