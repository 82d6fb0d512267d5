"""Compiles products with INT4 matrices for GPUs that need not be there.

`python -m tests.runtime.kernels.compiled_int4` prints, for each, how many columns a thread holds side by side, as
Triton has them in the layout of an operand: 2 of bfloat16, where the matrix units add columns in ascending order. Then
how many instructions move numbers between threads or through shared memory, before the sums: the loads of rows and
weights that are on their way are others.
"""

from __future__ import annotations

import re
from typing import Any

from runahead.runtime.kernels.triton.gemm import int4_gemm
from runahead.runtime.kernels.triton.gemm.epilogue import End, Sizes
from tests.runtime.kernels.compiled_fp8 import NONE, forms_of

TILINGS = ((80, 16, 8), (90, 16, 8), (90, 64, 64))  # compute capability, outputs of a program, rows of the batch
GROUPS = (128, 32)
_END: Any = End(NONE, NONE, NONE, "fp32", NONE, NONE, NONE)  # type: ignore[arg-type]
_POINTERS = {"x": "*bf16", "words": "*i32", "scales": "*i32", "out": "*bf16", "end": _END, "num_rows": "i32"}
_MOVED = re.compile(r"shfl\.sync|st\.shared")


def compiled(rows: int, columns: int, group: int, capability: int) -> Any:
    """A product with a matrix [1024, 512]."""
    sizes = Sizes(1024, 512, rows, columns, SQUARES=0, STRIDE=0, STEP=1, EPILOGUE=0, GELU=False, LONE=False)
    constants = {
        "SIZES": sizes, "SPLITS": 1, "GROUP": group, "STAGES": 3, "UNROLL": 1, "HALF": True, "ON_GPU": True,
    }  # fmt: skip
    return forms_of(int4_gemm._int4_product_kernel, constants, capability, rows // 16, **_POINTERS)


def main() -> None:
    for capability, rows, columns in TILINGS:
        for group in GROUPS:
            found = compiled(rows, columns, group, capability)
            widths = sorted(set(re.findall(r"kWidth = (\d+)", found["ttgir"])))
            body = found["ptx"].rsplit("mma", 1)[0]
            print(capability, rows, group, len(_MOVED.findall(body)), *widths)


if __name__ == "__main__":
    main()
