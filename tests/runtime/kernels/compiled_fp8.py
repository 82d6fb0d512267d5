"""Compiles products with FP8 matrices for GPUs that need not be there.

`python -m tests.runtime.kernels.compiled_fp8` prints, for each, how many columns a thread holds side by side, as Triton
has them in the layout of an operand: 2 of bfloat16, where the matrix units add columns in ascending order. Then how
many instructions move numbers between threads or read weights from shared memory in pieces of fewer than 16 bytes.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runahead.runtime.kernels.quantized_weight import PANEL_COLUMNS
from runahead.runtime.kernels.triton.gemm import fp8_gemm as product

CAPABILITIES = (80, 90)
TILINGS = ((16, 8, 4, 1), (64, 64, 2, 4))  # outputs of a program, rows of the batch, grains, warps
GROUPS = (512, 128)
_POINTERS = {
    "x": "*bf16", "numbers": "*u8", "scales": "*bf16", "bias": "*bf16", "squares_in": "*fp64", "out": "*bf16",
    "gamma": "*bf16", "scaled": "*bf16", "squares_out": "*fp64", "eps": "fp32", "num_rows": "i32",
}  # fmt: skip
_NARROW = re.compile(r"(?:shfl\.sync|ld\.shared\.(?:b8|b16|v2\.b8|v4\.b8|b32|v2\.b32))")


def compiled(tiling: tuple[int, int, int, int], group: int, capability: int) -> Any:
    """A product with a matrix [1024, 512]."""
    rows, columns, grains, warps = tiling
    kernel: Any = product._fp8_product_kernel
    constants = {
        "OUTPUTS": 1024, "DEPTH": 512, "COLUMNS": columns, "ROWS": rows, "GRAINS": grains, "GROUP": group, "STAGES": 3,
        "SQUARES": 0, "STRIDE": 0, "STEP": 1, "EPILOGUE": 0, "HAS_BIAS": False, "DEPENDENT": False, "GELU": False,
        "ON_GPU": True,
    }  # fmt: skip
    names = kernel.arg_names
    signature = {name: _POINTERS.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in _POINTERS.items() if kind[0] == "*"}
    places = {(names.index(name),): value for name, value in constants.items()}
    return triton.compile(
        ASTSource(kernel, signature, places, aligned), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )  # fmt: skip


def main() -> None:
    for tiling in TILINGS:
        for group in GROUPS:
            if group < PANEL_COLUMNS * tiling[2]:
                continue
            for capability in CAPABILITIES:
                found = compiled(tiling, group, capability)
                widths = sorted(set(re.findall(r"kWidth = (\d+)", found.asm["ttgir"])))
                body = found.asm["ptx"].split("mma", 1)[0]  # what follows the loop moves sums, not weights
                print(capability, group, *tiling, len(_NARROW.findall(body)), *widths)


if __name__ == "__main__":
    main()
