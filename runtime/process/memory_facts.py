"""What the log says at start of where memory goes, on any device."""

from __future__ import annotations

from dataclasses import dataclass

from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.memory import KeptBytes, weight_bytes
from runahead.runtime.wire.engine_config import EngineConfig


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
