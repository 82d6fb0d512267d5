"""Services that draft, by what drafts in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from runahead.runtime.checkpoint import BUNDLED_HEAD
from tests.parity.fitted_head3 import write_fitted_head3
from tests.parity.fitted_mimo import write_fitted_mimo
from tests.parity.recurrent_checkpoints import BUNDLED_HYBRID, HEADED, checkpoint_of
from tests.runtime.models.mimo_heads import BEGIN
from tests.runtime.models.shortened_model import write_shortened_model

_WRITTEN: dict[str, Callable[[Path], Path]] = {
    "eagle-3": write_fitted_head3,
    "wrapped": partial(write_fitted_head3, in_wrapping=True),
    "mtp": write_fitted_mimo,
    "model": write_shortened_model,
}
WITH_WEIGHTS = ("eagle-1", *_WRITTEN)  # the first is the bundled model's own
# Which of them are started in every run, by pool and how much they draft; the others where `--large` asks for them.
OF_POOLS = {("roomy", "3"): "wrapped", ("tight", "3"): "model", ("barrier", "auto"): "mtp"}
OF_RANDOM_WORKLOADS = {"3": "eagle-1", "auto": "eagle-3"}
OF_ACCEPTANCE = "wrapped"
OVER_STATES = "mtp-over-states"  # of a model of its own, so that it has no cells beside the bundled one
OF_HYBRID = "ngram-over-states"  # and so is this, the bundled hybrid
UNDRAFTED = "--no-draft-forced"  # a service without a drafter drafts nothing: nor what structures force


def flags_of(kind: str, folder: Path) -> list[str]:
    """With which a service of the bundled model drafts so, or of one that says the same. folder: where what drafts is
    written, or was. Those from `--model` on, if there is one, are the service's without a drafter too."""
    snapshots = ["--state-snapshot-blocks", "1", "--state-snapshots", "96"]
    if kind == OVER_STATES:
        checkpoint_of(HEADED, folder / kind)
        return ["--drafter", "mtp", "--model", str(folder / kind), *snapshots]
    if kind == OF_HYBRID:
        return ["--drafter", "ngram", "--model", str(BUNDLED_HYBRID), *snapshots]
    if kind not in _WRITTEN:
        return ["--drafter", "eagle" if kind == "eagle-1" else kind]
    written = folder / kind
    if not written.exists():
        _WRITTEN[kind](written)
    if kind == "mtp":
        return ["--drafter", kind, "--model", str(written)]
    return ["--drafter", "model" if kind == "model" else "eagle", "--draft-model", str(written)]


def flags_without(kind: str, folder: Path) -> list[str]:
    """With which a service of the same model drafts nothing."""
    flags = flags_of(kind, folder)
    return [UNDRAFTED, *(flags[flags.index("--model") :] if "--model" in flags else [])]


def parameters_of(kind: str, folder: Path) -> int:
    """Of what `flags_of` has written there, or of the bundled head."""
    place = BUNDLED_HEAD if kind == "eagle-1" else folder / kind
    in_torch = place / "pytorch_model.bin"
    tensors: dict[str, torch.Tensor] = (
        torch.load(in_torch, weights_only=True) if in_torch.exists() else load_file(place / "model.safetensors")
    )
    if "lm_head.weight" in tensors and "d2t" in tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][: len(tensors["d2t"])]
    begins = {"mtp": BEGIN, OVER_STATES: "mtp."}.get(kind, "")
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(begins)}
    return sum(tensor.numel() for name, tensor in own.items() if name != "d2t")
