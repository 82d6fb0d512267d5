"""Compiles one kernel with a kernel cache, as starts would: a process of its own, for a GPU that need not be there.

`python -m tests.runtime.kernels.cached_kernel FOLDER ACTION...` does one thing after the other. start: the kernel is
asked for, as by a process that has never seen it; prints `found` or `compiled` and the digest of the GPU's code, or the
sentence that refuses it. cut:FILE:BYTES: of a file in the folder only so many bytes are left. read-only: from there on
whatever would write to a disk fails, as on a root that is mounted so.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import triton

from runahead.runtime.kernels.triton.gpu.kernel_cache import KernelCacheError, use_kernel_cache
from runahead.runtime.kernels.triton.ops.embedding import _embed_kernel as embed
from tests.runtime.kernels.pretended_gpu import Address, NoGpu


def main() -> None:
    folder, *actions = sys.argv[1:]
    use_kernel_cache(folder, "--kernel-cache")
    triton.runtime.driver.set_active(NoGpu((9, 0)))
    for action in actions:
        match action.split(":"):
            case ["start"]:
                print(_started())
            case ["cut", name, left]:
                (path,) = Path(folder).rglob(name)
                path.write_bytes(path.read_bytes()[: int(left)])
            case ["read-only"]:
                for name in ("makedirs", "mkdir", "replace"):
                    setattr(os, name, _refuse)


def _started() -> str:
    found: list[bool] = []
    triton.knobs.compilation.listener = lambda **what: found.append(what["cache_hit"])
    embed.device_caches.clear()
    ids, tensor = (Address(torch.empty(8, dtype=dtype, device="meta")) for dtype in (torch.int64, torch.bfloat16))
    try:
        kernel = embed.run(ids, tensor, tensor, 0, 8, WIDTH=64, BLOCK=64, SCALE=1.0, grid=(1,), warmup=True)
    except KernelCacheError as error:
        return str(error)
    return f"{'found' if found == [True] else 'compiled'} {hashlib.sha256(kernel.kernel).hexdigest()}"


def _refuse(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


if __name__ == "__main__":
    main()
