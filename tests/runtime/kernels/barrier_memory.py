"""Finds barriers in shared memory whose memory the compiler gives to other data too.

The memory of a barrier (PTX: an mbarrier object) holds nothing else until the barrier is invalidated. Triton
invalidates none, and reuses the memory of one that nothing waits for.

Source: PTX ISA, "mbarrier.init" and "mbarrier.inval".
"""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from triton._C.libtriton import ir, nvidia, passes

_OFFSET: Final = re.compile(r"allocation\.offset = (\d+)")
_TYPE: Final = re.compile(r"memdesc<((?:\d+x)+)[a-z]+(\d+)")
_BARRIER: Final = re.compile(r"local_alloc .*memdesc<\d+x1xi64")
_PTX: Final = 84  # version of PTX
_CAPABILITY: Final = 90


class _Taken(NamedTuple):
    """Shared memory that an operation takes: its first byte, its bytes, and its text. The text has no size for scratch
    memory, which counts as one byte: only scratch that begins inside a barrier is found."""

    begin: int
    size: int
    text: str


def reused_barriers(ttgir: str) -> tuple[str, ...]:
    """Return the operations whose shared memory overlaps a barrier's. ttgir: a compiled kernel's, of compute capability
    9.0. Empty where there is no barrier."""
    if not _BARRIER.search(ttgir):
        return ()
    taken = [_taken(line) for line in _allocated(ttgir).splitlines() if _OFFSET.search(line)]
    barriers = [one for one in taken if _BARRIER.search(one.text)]
    assert barriers, "the kernel has barriers, and no memory was found for them"
    return tuple(
        other.text.strip()[:120]
        for barrier in barriers
        for other in taken
        if other is not barrier
        and other.begin < barrier.begin + barrier.size
        and barrier.begin < other.begin + other.size
    )


def _taken(line: str) -> _Taken:
    found, size = _OFFSET.search(line), 1
    assert found is not None
    if "local_alloc" in line and (kept := _TYPE.search(line)):
        size = math.prod(int(one) for one in kept[1].split("x") if one) * int(kept[2]) // 8
    return _Taken(int(found[1]), size, line)


def _allocated(ttgir: str) -> str:
    """Return the kernel's text with the offset of everything in shared memory, by the compiler's own passes."""
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttgir"
        path.write_text(ttgir, encoding="utf-8")
        module = ir.parse_mlir_module(str(path), context)
    module.context = context
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, _CAPABILITY, _PTX)
    manager.run(module, "allocated")
    return str(module)
