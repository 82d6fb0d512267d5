"""For which GPU kernels are chosen and compiled: whoever asks what a GPU can do asks here.

That is the current GPU, unless Triton's own switch `TRITON_OVERRIDE_ARCH` names an older one (`sm80`): then Triton
compiles in the form for that one, and what is chosen here is what would be chosen there. So the path for older GPUs can
be tested on a newer one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import triton

LEAST_SHARED_MEMORY: Final = 99 * 1024  # of a program, on any GPU from compute capability 8.0 on
_DEPENDENT_LAUNCH: Final = (9, 0)  # the first compute capability that knows it
_ARCH: Final = re.compile(r"sm(\d+)(\d)")
# Compute capability and multiprocessors of the GPUs on which the tables of tilings and plans were measured.
_MEASURED: Final = {"NVIDIA H200": ((9, 0), 132)}


@dataclass(frozen=True, slots=True)
class Gpu:
    """name: the driver's; in `measured_tilings.json` a GPU has the same. shared_memory: bytes that a program may have.
    stands_for_older: the capability is not its own but the one that it is to be used as, and nothing was measured."""

    name: str
    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int = 0  # unknown: no other GPU is of its kind
    stands_for_older: bool = False

    @property
    def knows_dependent_launch(self) -> bool:
        return self.capability >= _DEPENDENT_LAUNCH

    def measured_as(self, names: Iterable[str]) -> str | None:
        """Of the names of measured GPUs, the one whose cuts are this GPU's: its own, else that of a GPU with the same
        compute capability and as many multiprocessors. Such two differ in their memory alone, as an H100 and an H200
        do, and a default is a guess for both. None: there is no such GPU."""
        if self.stands_for_older:
            return None
        chip = (self.capability, self.multiprocessors)
        alike = [name for name in names if name == self.name or _MEASURED.get(name) == chip]
        return self.name if self.name in alike else next(iter(alike), None)


@cache
def current_gpu() -> Gpu | None:
    """None where kernels run in Triton's interpreter, or where there is no GPU. Asked once a process."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return None
    device = torch.cuda.current_device()
    name, own = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    said = triton.runtime.driver.active.utils.get_device_properties(device)
    multiprocessors = int(said["multiprocessor_count"])
    if (arch := triton.knobs.runtime.override_arch) is None:
        return Gpu(name, own, int(said["max_shared_mem"]), multiprocessors)
    return Gpu(name, capability_of(arch), LEAST_SHARED_MEMORY, multiprocessors, stands_for_older=True)


def capability_of(arch: str) -> tuple[int, int]:
    """(8, 0) of "sm80". Raises ValueError."""
    found = _ARCH.fullmatch(arch)
    if found is None:
        raise ValueError(f"TRITON_OVERRIDE_ARCH must be a name such as sm80, and is {arch!r}")
    return int(found[1]), int(found[2])
