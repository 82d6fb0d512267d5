"""What a training run leaves from time to time, so that another process can go on with it: one safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

STATE: Final = "state.safetensors"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come. seconds: that it has trained, over all processes. best: bits a byte on the dev files."""

    name: str
    step: int
    seconds: float
    best: float


def save_state(
    folder: Path,
    progress: Progress,
    network: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    best: dict[str, Tensor],
) -> None:
    """Write the state, whole or not at all for whoever reads it later. best: the weights that were best so far."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"network/{name}": value for name, value in network.state_dict().items()}
    tensors |= {f"best/{name}": value for name, value in best.items()}
    for number, optimizer in enumerate(optimizers):
        for parameter, values in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{number}/{parameter}/{name}": value for name, value in values.items()}
    numbers = {name: str(value) for name, value in asdict(progress).items()}
    save_file(
        {name: value.detach().cpu().clone() for name, value in tensors.items()}, folder / f"{STATE}.next", numbers
    )
    (folder / f"{STATE}.next").replace(folder / STATE)


def load_state(
    folder: Path, network: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Progress, dict[str, Tensor]]:
    """Put network and optimizers where the run was. Returns how far it was, and its best weights.

    Raises FileNotFoundError where there is no state, RuntimeError or KeyError for that of another network.
    """
    with safe_open(folder / STATE, framework="pt") as file:
        numbers = file.metadata()
    parts: dict[str, dict[str, Tensor]] = {"network": {}, "best": {}, "optimizer": {}}
    for name, value in load_file(folder / STATE).items():
        part, _, inside = name.partition("/")
        parts[part][inside] = value
    network.load_state_dict(parts["network"])
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in parts["optimizer"].items():
            owner, parameter, field = name.split("/")
            if int(owner) == number:
                state.setdefault(int(parameter), {})[field] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    progress = Progress(
        numbers["name"],
        int(numbers["step"]),
        float(numbers["seconds"]),
        float(numbers["best"]),
    )
    return progress, parts["best"]
