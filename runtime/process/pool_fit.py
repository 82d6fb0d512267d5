"""How large the KV pool is, and what becomes of a start whose memory runs out. Decision 0051 says why.

Beside weights and pool a device needs memory that no formula knows: buffers, what launches that are no graph take while
they run, graphs. So the largest launches are tried first, on a pool of a few blocks, and given back. What is left after
that and a stated overhead is the pool. If memory runs out all the same, the start tries once more with a smaller pool,
and then refuses with a sentence.
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
    """Of a head or a model that drafts. block: that it keeps in a KV block."""

    weights: int
    block: int


def memory_facts(
    config: EngineConfig, model: Decoder, kept: KeptBytes, blocks: int, snapshots: int = 0,
    drafting: DraftingBytes | None = None,
) -> dict[str, int]:  # fmt: skip
    """Bytes that the model, its KV blocks, the states of its rows and the snapshots of states take, by name, and what
    these pools take together: logged at start. kept: with what drafts, which is named by itself. drafting: None where
    nothing with weights drafts."""
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


TRIAL_BLOCKS: Final = 2  # the null block and one more: launches that are tried out write to no other
_MIB: Final = 1 << 20
_OVERHEAD_SHARE: Final = 0.03  # of the device's memory
_LEAST_OVERHEAD: Final = 768 * _MIB
_SMALLER: Final = (9, 10)  # the pool of the second attempt over that of the first
# What libraries say that have an error of their own: CUDA's driver, its libraries, torch's allocator for a CPU.
_SAYINGS: Final = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "not enough memory")

Built = TypeVar("Built")


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of a device beside weights and KV pool. buffers: they live as long as it does. launches: what those that
    are no graph take while they run, at most. graphs: all that were captured."""

    buffers: int = 0
    launches: int = 0
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.buffers + self.launches + self.graphs

    def by_name(self) -> dict[str, int]:
        """For the log."""
        return {"buffer_bytes": self.buffers, "launch_bytes": self.launches, "graph_bytes": self.graphs}


def overhead(memory: int) -> int:
    """Bytes that a start leaves alone on a device with so many: for graphs that the trial does not capture, for what an
    allocator can't use of what it holds, and for whoever else is there."""
    return max(_LEAST_OVERHEAD, int(memory * _OVERHEAD_SHARE))


@dataclass(frozen=True, slots=True)
class PoolFit(Generic[Built]):
    """Builds a device with a pool that fits.

    weight_bytes: of the model, and of what drafts for it. kept: with what a drafter keeps in a KV block. snapshots: of
    states, that there is room for. build: makes the device with so many blocks. check: raises ConfigError for a pool
    that is too small. give_back: what nobody holds any more, to the device.
    """

    config: EngineConfig
    weight_bytes: int
    kept: KeptBytes
    snapshots: int
    build: Callable[[int], Built]
    check: Callable[[int], None]
    give_back: Callable[[], None] = lambda: None

    def built(self, blocks: int, needs: Needs | None = None) -> tuple[Built, int]:
        """A device, and the blocks that it has: so many, or once fewer where memory runs out and nobody has set their
        number. needs: as the trial found them.

        Raises ConfigError where that does not help.
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
        """What the trial found. Raises ConfigError where memory runs out meanwhile."""
        found = _attempt(trial, self.give_back)
        if isinstance(found, OutOfMemory):
            raise ConfigError(self.refusal(TRIAL_BLOCKS, None))
        return found

    def refusal(self, blocks: int, needs: Needs | None) -> str:
        """The sentence for memory that does not suffice. needs: None where the trial itself has failed."""
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
            "state_snapshots": self.snapshots > 1 or config.state_snapshots > 1,  # 0 would leave it to the start again
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
    """why: the first line of the error."""

    why: str


def _attempt(build: Callable[[], Built], give_back: Callable[[], None]) -> Built | OutOfMemory:
    """Nothing of one that failed is held when this returns: not by the error either, whose frames would."""
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
    """Raises ConfigError where memory runs out while the weights are loaded."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"memory ran out while the weights were loaded, which take {_mib(weight_bytes)}: serve a smaller model, or "
            "end what else takes memory"
        ) from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Is that what an error says, or one that it came of? What ends a capture may fail because of it."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(saying in str(error) for saying in _SAYINGS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _mib(size: int) -> str:
    return f"{size // _MIB} MiB"
