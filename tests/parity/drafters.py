"""Services that draft, by what drafts in them."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from tests.parity.fitted_head import write_fitted_head
from tests.parity.fitted_head3 import write_fitted_head3

_HEADS = {"eagle-1": write_fitted_head, "eagle-3": write_fitted_head3}
WITH_WEIGHTS = tuple(_HEADS)
# Which of them are started in every run, by pool and how much they draft; the others where `--large` asks for them.
OF_POOLS = {("roomy", "3"): "eagle-3", ("tight", "3"): "eagle-1", ("barrier", "auto"): "eagle-1"}
OF_RANDOM_WORKLOADS = {"3": "eagle-1", "auto": "eagle-3"}
OF_ACCEPTANCE = "eagle-3"


def flags_of(kind: str, folder: Path) -> list[str]:
    """With which a service of the bundled model drafts so. folder: where what drafts is written, or was."""
    if kind not in _HEADS:
        return ["--drafter", kind]
    head = folder / kind
    if not head.exists():
        _HEADS[kind](head)
    return ["--drafter", "eagle", "--draft-model", str(head)]


def parameters_of(kind: str, folder: Path) -> int:
    """Of what `flags_of` has written there."""
    tensors = load_file(folder / kind / "model.safetensors")
    return sum(tensor.numel() for name, tensor in tensors.items() if name != "d2t")
