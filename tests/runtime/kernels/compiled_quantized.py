"""Compiles products with quantized matrices for GPUs that need not be there.

`python -m tests.runtime.kernels.compiled_quantized` prints, for each, how many columns a thread holds side by side, as
Triton has them in the layout of an operand: 2 of bfloat16, where the matrix units add columns in ascending order.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runahead.runtime.kernels.triton.gemm import quantized_gemm as product

CAPABILITIES = (80, 90)
_POINTERS = {"x": "*bf16", "numbers": "*u8", "scales": "*fp32", "zero_points": "*u8", "out": "*bf16"}


def widths(kind: int, group: int, rows: int, warps: int, capability: int) -> set[str]:
    """Of a product of 8 rows with a matrix [1024, 512]. rows: outputs of a program."""
    kernel: Any = product._quantized_product_kernel
    constants = {
        "OUTPUTS": 1024, "DEPTH": 512, "COLUMNS": 16, "ROWS": rows, "BLOCK": 64, "KIND": kind,
        "TARGET": 2 if capability >= 89 else 1, "GROUPS": 512 // group, "GROUP": group, "ZEROS": False, "STAGES": 3,
        "DEPENDENT": False,
    }  # fmt: skip
    names = kernel.arg_names
    signature = {name: _POINTERS.get(name, "i32" if name == "num_rows" else "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in _POINTERS}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "enable_fp_fusion": False}
    )
    return set(re.findall(r"kWidth = (\d+)", compiled.asm["ttgir"]))


def main() -> None:
    for kind, number in product._KINDS.items():
        for capability in CAPABILITIES:
            print(kind, capability, *sorted(widths(number, 128 if kind == "int4" else 512, 16, 1, capability)))


if __name__ == "__main__":
    main()
