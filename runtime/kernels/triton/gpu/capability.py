"""The GPU for which kernels are chosen and compiled.

The current GPU, unless Triton's switch `TRITON_OVERRIDE_ARCH` names an older one (`sm80`): then Triton compiles for
that one, and the choices here follow. So older GPUs' code paths can be tested on a newer GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import triton

LEAST_SHARED_MEMORY: Final = 99 * 1024  # of a program, on any GPU with compute capability 8.0 or higher
_DEPENDENT_LAUNCH: Final = (9, 0)  # the first compute capability with programmatic dependent launch
_ARCH: Final = re.compile(r"sm(\d+)(\d)")
# Compute capability and multiprocessors of the GPUs with measured tables.
_MEASURED: Final = {"NVIDIA H200": ((9, 0), 132)}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.
    name: the driver's, and the key in `measured_tilings.json`. shared_memory: most bytes of a program.
    stands_for_older: the capability is overridden, and nothing was measured for it.
    """

    name: str
    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int = 0  # unknown: no GPU is equivalent
    stands_for_older: bool = False

    @property
    def knows_dependent_launch(self) -> bool:
        return self.capability >= _DEPENDENT_LAUNCH

    def measured_as(self, names: Iterable[str]) -> str | None:
        """Return the measured GPU whose tables apply: this one, else one with the same compute capability and number of
        multiprocessors. Two such GPUs differ only in memory, like H100 and H200; a default would be a guess for both.
        None: there is no such GPU.
        """
        if self.stands_for_older:
            return None
        chip = (self.capability, self.multiprocessors)
        alike = [name for name in names if name == self.name or _MEASURED.get(name) == chip]
        return self.name if self.name in alike else next(iter(alike), None)


@cache
def current_gpu() -> Gpu | None:
    """Return the current GPU, None in Triton's interpreter or without a GPU. Cached for the process."""
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
    """Parse "sm80" to (8, 0). Raises ValueError."""
    found = _ARCH.fullmatch(arch)
    if found is None:
        raise ValueError(f"TRITON_OVERRIDE_ARCH must be a name such as sm80, and is {arch!r}")
    return int(found[1]), int(found[2])
