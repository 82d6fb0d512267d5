"""Compiles products with INT4 matrices for GPUs that need not be there.

`python -m tests.runtime.kernels.compiled_int4` prints, for each, how many columns a thread holds side by side, as
Triton has them in the layout of an operand: 2 of bfloat16, where the matrix units add columns in ascending order. Then
how many instructions move numbers between threads or through shared memory, before the sums: the loads of rows and
weights that are on their way are others.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runahead.runtime.kernels.triton.gemm import int4_gemm

TILINGS = ((80, 16, 8), (90, 16, 8), (90, 64, 64))  # compute capability, outputs of a program, rows of the batch
GROUPS = (128, 32)
_POINTERS = {
    "x": "*bf16", "words": "*i32", "scales": "*i32", "bias": "*bf16", "squares_in": "*fp64", "out": "*bf16",
    "gamma": "*bf16", "scaled": "*bf16", "squares_out": "*fp64", "eps": "fp32", "num_rows": "i32",
}  # fmt: skip
_MOVED = re.compile(r"shfl\.sync|st\.shared")


def compiled(rows: int, columns: int, group: int, capability: int) -> Any:
    """A product with a matrix [1024, 512]."""
    kernel: Any = int4_gemm._int4_product_kernel
    constants = {
        "OUTPUTS": 1024, "DEPTH": 512, "COLUMNS": columns, "ROWS": rows, "SPLITS": 1, "GROUP": group, "STAGES": 3,
        "UNROLL": 1, "SQUARES": 0, "STRIDE": 0, "STEP": 1, "EPILOGUE": 0, "HAS_BIAS": False,
        "GELU": False, "HALF": True, "ON_GPU": True,
    }  # fmt: skip
    names = kernel.arg_names
    signature = {name: _POINTERS.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in _POINTERS.items() if kind[0] == "*"}
    places = {(names.index(name),): value for name, value in constants.items()}
    return triton.compile(
        ASTSource(kernel, signature, places, aligned), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": rows // 16, "enable_fp_fusion": False},
    )  # fmt: skip


def main() -> None:
    for capability, rows, columns in TILINGS:
        for group in GROUPS:
            found = compiled(rows, columns, group, capability)
            widths = sorted(set(re.findall(r"kWidth = (\d+)", found.asm["ttgir"])))
            body = found.asm["ptx"].rsplit("mma", 1)[0]
            print(capability, rows, group, len(_MOVED.findall(body)), *widths)


if __name__ == "__main__":
    main()
