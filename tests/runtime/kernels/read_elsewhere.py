"""What threads of a program read of memory that others of its threads write, found in the code that Triton compiles.

A *layout* says which thread has which element of a tensor. Where a small tensor is needed in two layouts Triton loads
it once in each, since that is cheaper than an exchange. A kernel that then writes the same memory, in one of the
layouts, may have written it before a slower warp has loaded it in the other: nothing orders the two but a barrier.
Triton's interpreter has no threads and shows nothing of this.
"""

from __future__ import annotations

import re
from typing import Final

_ARGUMENT: Final = re.compile(r"(%\w+): !tt\.ptr<")
_MOVED: Final = re.compile(
    r"(%\w+) = (?:tt\.splat|tt\.addptr|tt\.broadcast|tt\.expand_dims|ttg\.convert_layout) (%\w+)"
)
_READ: Final = re.compile(r" = tt\.load (%\w+).*: (tensor<.*>)")
_WRITTEN: Final = re.compile(r"^\s*tt\.store (%\w+),.*: (tensor<.*>)")
_BARRIER: Final = re.compile(r"\b(ttg|gpu)\.barrier\b")  # in Triton 3.7, and in 3.6
_FOR_ONE_WARP: Final = '"ttg.num-warps" = 1 :'


def read_elsewhere(ttgir: str) -> tuple[str, ...]:
    """Names of the kernel's arguments of which elements were read in several layouts and then written, with no barrier
    that the kernel asks for between.

    ttgir: `kernel.asm["ttgir"]`. The lines of loops and branches are taken in the order in which they stand there.
    """
    if _FOR_ONE_WARP in ttgir:
        return ()
    points_into: dict[str, str] = {}
    layouts: dict[str, set[str]] = {}  # by argument: of what was read since the last barrier
    found: dict[str, None] = {}
    for line in ttgir.splitlines():
        if "tt.func public" in line:
            points_into = {name: name for name in _ARGUMENT.findall(line)}
        elif moved := _MOVED.search(line):
            if moved[2] in points_into:
                points_into[moved[1]] = points_into[moved[2]]
        elif _BARRIER.search(line):
            layouts.clear()
        elif (read := _READ.search(line)) and read[1] in points_into:
            layouts.setdefault(points_into[read[1]], set()).add(read[2])
        elif (written := _WRITTEN.search(line)) and len(layouts.get(points_into.get(written[1], ""), ())) > 1:
            found[points_into[written[1]].removeprefix("%")] = None
    return tuple(found)
