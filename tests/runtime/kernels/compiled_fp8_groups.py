"""Compiles FP8 products by groups of warps for a GPU of compute capability 9.0 that need not be there.

`python -m tests.runtime.kernels.compiled_fp8_groups` prints, with a scale for each block and for each channel, rows of
the batch, the matrix units' instruction, whether both groups wait for the kernels before, whether the shared memory
fits, and whether the barriers' memory holds nothing else.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from runahead.runtime.kernels.quantized_weight import Fp8Weight
from runahead.runtime.kernels.triton.gemm.fp8_hopper import fp8_group_product
from runahead.runtime.kernels.triton.gemm.fp8_rows import empty_rows
from tests.runtime.kernels.barrier_memory import reused_barriers
from tests.runtime.kernels.compiled_launches import SHARED_MEMORY
from tests.runtime.kernels.pretended_gpu import Address, NoGpu

CAPABILITY = (9, 0)
OUTPUTS, DEPTH, ROWS = 1024, 512, (1, 64)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def main() -> None:
    triton.runtime.driver.set_active(NoGpu(CAPABILITY))
    run = JITFunction.run

    def compile_alone(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        passed = [Address(one) if isinstance(one, torch.Tensor) else one for one in arguments]
        kernel = run(self, *passed, grid=grid, warmup=True, **options)
        ptx = kernel.asm["ptx"]
        units = sorted(set(re.findall(r"wgmma\.mma_async\S+", ptx)))
        fits = kernel.metadata.shared <= SHARED_MEMORY[CAPABILITY]
        is_apart = not reused_barriers(kernel.asm["ttgir"])
        print(options["SIZES"].ROWS, *units, ptx.count("griddepcontrol.wait") > 1, fits, is_apart)

    JITFunction.run = compile_alone
    numbers = _empty(OUTPUTS, DEPTH, dtype=torch.float8_e4m3fn)
    blocks, of_outputs = (_empty(*shape, dtype=torch.float32) for shape in ((8, 4), (4, OUTPUTS)))
    for channels in (None, _empty(OUTPUTS, dtype=torch.float32)):
        weight = Fp8Weight(numbers, blocks, of_outputs, channels, torch.bfloat16)
        for rows in ROWS:
            x = empty_rows(rows, DEPTH, torch.device("meta"))
            fp8_group_product(x, weight, _empty(len(x), OUTPUTS), rows, True, 132)


if __name__ == "__main__":
    main()
