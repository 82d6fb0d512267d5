"""What rank 0 and the processes of the other ranks say to each other while they start, a line of JSON each.

Rank 0 hands over everything it has found out; a rank answers with what it makes of it. Then the ranks agree on a number
of KV blocks that all of them have memory for.
"""

from __future__ import annotations

import platform
from hashlib import sha256

import msgspec
import numpy as np
import torch

from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.ranks.segment import SegmentLayout
from runahead.runtime.wire.engine_config import EngineConfig


class RankOrders(msgspec.Struct, frozen=True, kw_only=True):
    """rank: whose orders they are. descriptor: of the segment's memory, in the rank's process. config: with every size
    in it. context: tokens of a request, at most. products: how products are computed, by name. threads: of torch.
    snapshots: of recurrent states. digest: as `digest` of rank 0. parent: the process of rank 0. forced: drafts of a
    row with a grammar; None: no row has one. gpu: the number of the rank's GPU; without meaning on CPUs."""

    rank: int
    descriptor: int
    layout: SegmentLayout
    config: EngineConfig
    context: int
    products: str
    threads: int
    snapshots: int
    digest: dict[str, str]
    parent: int
    forced: int | None = None
    gpu: int = 0


class Mailbox(msgspec.Struct, frozen=True):
    """handle: by which other ranks' GPUs open what the rank's own GPU is written into, in hexadecimal digits."""

    handle: str


class Mailboxes(msgspec.Struct, frozen=True):
    """handles: of all ranks, in rank order."""

    handles: tuple[str, ...]


class Captured(msgspec.Struct, frozen=True):
    """The rank's graphs are there. digest: of their keys, and of the exchanges within all launches so far."""

    digest: str


class CannotStart(msgspec.Struct, frozen=True):
    """The rank ends. reason: a sentence. It replaces any other message of a start."""

    reason: str


class RankLoaded(msgspec.Struct, frozen=True):
    """The rank has its weights. differs: what it has found other than rank 0, in words; empty where nothing is."""

    differs: str = ""


class BlocksOffered(msgspec.Struct, frozen=True):
    """blocks: KV blocks that the rank is to make. final: it follows launches with them. snapshots: of recurrent states,
    beside which a GPU has room for the blocks."""

    blocks: int
    final: bool = False
    snapshots: int = 0


class BlocksMade(msgspec.Struct, frozen=True):
    """blocks: that the rank has memory for: those offered, or fewer."""

    blocks: int


def digest(checkpoint: Checkpoint, model: ModelConfig, layout: SegmentLayout, *, has_weights: bool) -> dict[str, str]:
    """What has to be the same on every rank, by name, each as a digest or a version."""
    tensors = checkpoint.tensors() if has_weights else {}
    stored = sorted((name, tensor.shape, tensor.size_bytes) for name, tensor in tensors.items())
    return {
        "the model's configuration": sha256(repr(model).encode()).hexdigest(),
        "the model's tensors": sha256(repr(stored).encode()).hexdigest(),
        "the segment's layout": sha256(msgspec.json.encode(layout)).hexdigest(),
        "the versions of Python, torch and NumPy": f"{platform.python_version()} {torch.__version__} {np.__version__}",
    }


def what_differs(one: dict[str, str], other: dict[str, str]) -> str:
    """The names of what is not the same, joined; empty where all is."""
    return ", ".join(name for name in sorted({*one, *other}) if one.get(name) != other.get(name))
