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
    """Orders of a rank: everything that rank 0 has found out. rank: its number. descriptor: of the segment's memory, in
    the rank's process. digest: as `digest` of rank 0. parent: the process of rank 0. config: with every size in it.
    context: tokens of a request, at most. threads: of torch. products: how products are computed on CPUs, by name.
    gpus: of each rank, by number; empty on CPUs. forced: drafts of a row with a grammar, on GPUs; None: no row has
    one."""

    layout: SegmentLayout
    config: EngineConfig
    context: int
    parent: int
    rank: int = 0
    descriptor: int = -1
    digest: dict[str, str] = {}
    threads: int = 1
    products: str = ""
    gpus: tuple[int, ...] = ()
    forced: int | None = None


class Mailbox(msgspec.Struct, frozen=True):
    """A rank's mailbox in its GPU's memory. handle: opens it on other ranks' GPUs, in hexadecimal digits."""

    handle: str


class Mailboxes(msgspec.Struct, frozen=True):
    """The mailboxes of all ranks. handles: in rank order."""

    handles: tuple[str, ...]


class Captured(msgspec.Struct, frozen=True):
    """The rank's device is there. digest: of its graphs' keys, and of the exchanges within all launches so far; empty
    on CPUs."""

    digest: str


class CannotStart(msgspec.Struct, frozen=True):
    """The rank ends. reason: a sentence. It replaces any other message of a start."""

    reason: str


class RankLoaded(msgspec.Struct, frozen=True):
    """The rank has its weights. differs: what it has found other than rank 0, in words; empty where nothing is."""

    differs: str = ""


class BlocksOffered(msgspec.Struct, frozen=True):
    """An offer of a number of KV blocks; the second one is final. snapshots: of recurrent states beside them."""

    blocks: int
    snapshots: int


class BlocksMade(msgspec.Struct, frozen=True):
    """The answer to the first offer. blocks: that the rank has memory for, at most those offered."""

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
