"""Multi-token prediction (MTP) heads in a model's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from runahead.runtime.checkpoint import Checkpoint, CheckpointError, StoredTensor
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.drafters.head_files import HeadFiles
from runahead.runtime.models.registry import ARCHITECTURES


def names_head(target: ModelConfig) -> bool:
    """Whether the model's configuration names exactly one supported head."""
    own = ARCHITECTURES[target.architecture].heads
    return own is not None and own.count(target) == 1


def comes_with_head(checkpoint: Checkpoint, target: ModelConfig, *, has_weights: bool) -> bool:
    """Whether the model's checkpoint has a usable head. has_weights: see `open_mtp`."""
    if not names_head(target):
        return False
    try:
        open_mtp(checkpoint, target, "", has_weights=has_weights)
    except CheckpointError:
        return False
    return True


def open_mtp(checkpoint: Checkpoint, target: ModelConfig, asked: str, *, has_weights: bool) -> HeadFiles:
    """Open the head in a model's checkpoint. asked: the setting and its value in messages. has_weights: False for
    random weights, whose files are not read.

    Raises CheckpointError for a model with no or several heads, and for tensors that do not fit.
    """
    own, unstacked = ARCHITECTURES[target.architecture].heads, ARCHITECTURES[target.architecture].unstacked
    if own is None:
        known = ", ".join(name for name, found in ARCHITECTURES.items() if found.heads is not None)
        raise CheckpointError(
            f"{asked} drafts with a head that comes with the checkpoint, and {target.architecture} has none that is "
            f"served; {known} have one"
        )
    count = own.count(target)
    if count != 1:
        has = "has no head" if count == 0 else f"has {count} heads, which guess one after the other"
        raise CheckpointError(
            f"{asked} drafts with the one head of a checkpoint, and by its config.json {checkpoint.path} {has}"
        )
    stored: Mapping[str, StoredTensor] = {}
    if has_weights:
        found = checkpoint.tensors()
        stored = {own.named(name): tensor for name, tensor in found.items() if name.startswith(own.begins)}
        stored = stored if unstacked is None else unstacked(target, stored)
    head = HeadFiles(
        f"the head in {checkpoint.path}",
        f"a head of {target.architecture}",
        stored,
        lambda tensors: own.build(target, tensors),
        in_file=own.in_file,
    )
    if has_weights and not stored:
        raise CheckpointError(
            f"{asked} drafts with the head of a checkpoint, and {checkpoint.path} lacks it: there is no tensor "
            f"{own.in_file(next(iter(head.expected())))}, nor another whose name begins with {own.begins}; "
            "transformers leaves heads out where it saves a model"
        )
    if has_weights:
        head.check()
    else:
        head.expected()  # which refuses a head that its configuration describes otherwise
    return head
