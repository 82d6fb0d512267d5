"""Compiles kernels of FP8 for GPUs that need not be there.

`python -m tests.runtime.kernels.compiled_fp8` prints, for each compute capability and number of rows, the matrix
units' instructions of a product, and for each capability the conversions of `fp8_rows`.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runahead.runtime.kernels.triton.gemm import fp8_gemm, fp8_rows

CAPABILITIES = (89, 90)
ROWS = (16, 64)  # of the batch
_POINTERS = {
    "x": "*fp8e4nv", "x_scales": "*fp32", "numbers": "*fp8e4nv", "scales": "*fp32", "bias": "*bf16",
    "squares_in": "*fp64", "out": "*bf16", "gamma": "*bf16", "scaled": "*bf16", "squares_out": "*fp64", "eps": "fp32",
    "num_rows": "i32", "padded_rows": "i32",
}  # fmt: skip


def compiled(kernel: Any, constants: dict[str, Any], capability: int, **pointers: str) -> str:
    """PTX."""
    kinds = _POINTERS | pointers
    names = kernel.arg_names
    signature = {name: kinds.get(name, "constexpr") for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in kinds.items()
        if kind[0] == "*" and name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    made = triton.compile(
        ASTSource(kernel, signature, places, aligned), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4, "enable_fp_fusion": False},
    )  # fmt: skip
    return str(made.asm["ptx"])


def main() -> None:
    for capability in CAPABILITIES:
        for rows in ROWS:
            constants = {
                "OUTPUTS": 1024, "DEPTH": 512, "COLUMNS": rows, "ROWS": 64, "STAGES": 3, "SQUARES": 0, "STRIDE": 0,
                "STEP": 1, "EPILOGUE": 0, "HAS_BIAS": False, "DEPENDENT": capability >= 90, "GELU": False,
            }  # fmt: skip
            product = compiled(fp8_gemm._fp8_product_kernel, constants, capability)
            print(capability, rows, *sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S+", product))))
        constants = {"DEPTH": 512, "BLOCKS": 4, "DEPENDENT": capability >= 90}
        quantize = compiled(fp8_rows._quantize_kernel, constants, capability, x="*bf16")
        print(capability, "rows", *sorted(set(re.findall(r"cvt\S+e4m3x2\S+", quantize))))


if __name__ == "__main__":
    main()
