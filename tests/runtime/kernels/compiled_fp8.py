"""Compiles kernels of FP8 for GPUs that need not be there.

`python -m tests.runtime.kernels.compiled_fp8` prints, for each compute capability and number of rows, the matrix
units' instructions of a product, and for each capability the conversions of kernels that leave rows in FP8.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runahead.runtime.kernels.triton.gemm import fp8_gemm, fp8_rows, separate_epilogue
from runahead.runtime.kernels.triton.gemm.epilogue import GATED

CAPABILITIES = (89, 90)
ROWS = (16, 64)  # of the batch
_POINTERS = {
    "x": "*fp8e4nv", "x_scales": "*fp32", "numbers": "*fp8e4nv", "blocks": "*fp32", "channels": "*fp32",
    "scales": "*fp32", "bias": "*bf16", "squares_in": "*fp64", "out": "*bf16", "gamma": "*bf16", "scaled": "*bf16",
    "squares_out": "*fp64", "eps": "fp32", "num_rows": "i32", "padded_rows": "i32",
    "sums": "*bf16", "residual": "*bf16", "squares": "*fp64", "before": "*fp64",
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
            constants = {"OUTPUTS": 1024, "DEPTH": 512, "ALONG": 4, "COLUMNS": rows, "ROWS": 64, "STAGES": 3}
            product = compiled(fp8_gemm._fp8_product_kernel, constants, capability)
            print(capability, rows, *sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S+", product))))
        dependent = capability >= 90
        quantize = {"DEPTH": 512, "BLOCKS": 4}
        finish = {
            "WIDTH": 1024, "DEPTH": 512, "BLOCK": 512, "SQUARES": 1, "STRIDE": 16, "STEP": 1, "EPILOGUE": GATED,
            "HAS_CHANNELS": True, "HAS_BIAS": False, "GELU": False, "FP8": True,
        }  # fmt: skip
        add = {
            "WIDTH": 1152, "DEPTH": 512, "BLOCK": 2048, "SQUARES": 1, "STRIDE": 16, "STEP": 1, "HAS_CHANNELS": True,
            "HAS_BIAS": False, "FP8": True,
        }  # fmt: skip
        for name, kernel, constants in (
            ("rows", fp8_rows._quantize_kernel, quantize),
            ("finish", separate_epilogue._finish_kernel, finish),
            ("add", separate_epilogue._add_kernel, add),
        ):
            ptx = compiled(kernel, constants | {"DEPENDENT": dependent}, capability, x="*bf16")
            assert ("griddepcontrol.wait" in ptx) == dependent, name
            print(capability, name, *sorted(set(re.findall(r"cvt\S+e4m3x2\S+", ptx))))


if __name__ == "__main__":
    main()
