"""Compiles kernels of FP8 for GPUs that need not be there.

`python -m tests.runtime.kernels.compiled_fp8` prints, for each compute capability and number of rows, the matrix
units' instructions of a product, and for each capability the conversions of kernels that leave rows in FP8. Then for
9.0 and each number of entries of an item the instructions of experts' products.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.triton.gemm import fp8_gemm, separate_epilogue
from runahead.runtime.kernels.triton.gemm.epilogue import ADD, GATED, STORE
from runahead.runtime.kernels.triton.moe import grouped_gemm
from runahead.runtime.kernels.triton.moe.routing import Routing
from runahead.runtime.kernels.triton.moe.topk import choice_sizes
from runahead.runtime.kernels.triton.moe.tuning import FIRST_GATED, ExpertProduct, expert_tiling

NONE = "constexpr"  # in the place of a tensor
CAPABILITIES = (89, 90)
ROWS = (16, 64)  # of the batch
_POINTERS = {
    "x": "*fp8e4nv", "x_scales": "*fp32", "numbers": "*fp8e4nv", "blocks": "*fp32", "channels": "*fp32",
    "scales": "*fp32", "bias": "*bf16", "squares_in": "*fp64", "out": "*bf16", "gamma": "*bf16", "scaled": "*bf16",
    "squares_out": "*fp64", "eps": "fp32", "num_rows": "i32", "padded_rows": "i32",
    "sums": "*bf16", "squares": "*fp64",
}  # fmt: skip
_ROUTING: Any = Routing("*fp32", "*i32", "*i32", "*fp32", "i32")  # type: ignore[arg-type]
_OF_EXPERTS = {
    "x": "*fp8e4nv", "x_scales": "*fp32", "weight": "*fp8e4nv", "weight_scales": "*fp32", "routed": _ROUTING,
    "padded_rows": "i32", "num_tokens": "i32",
}  # fmt: skip


def compiled(kernel: Any, constants: dict[str, Any], capability: int, **pointers: Any) -> str:
    """PTX."""
    return str(forms_of(kernel, constants, capability, 4, **pointers)["ptx"])


def forms_of(kernel: Any, constants: dict[str, Any], capability: int, warps: int, **pointers: Any) -> Any:
    """Return everything from Triton's own form to PTX, by name. constants: None for arguments that are in neither.
    pointers: a type for each argument, or a tuple of types; NONE: None is given."""
    kinds: dict[str, Any] = _POINTERS | pointers
    names = kernel.arg_names
    signature = {name: kinds.get(name, NONE) for name in names}
    types = dict(_types(signature.values()))
    aligned = {place: [["tt.divisibility", 16]] for place, kind in types.items() if kind[0] == "*"}
    places = {place: None for place, kind in types.items() if kind == NONE}
    places |= {(names.index(name),): value for name, value in constants.items()}
    made = triton.compile(
        ASTSource(kernel, signature, places, aligned), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )  # fmt: skip
    return made.asm


def _types(kinds: Iterable[Any], outer: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """The place and the type of every argument, those in tuples one by one."""
    for number, kind in enumerate(kinds):
        place = (*outer, number)
        yield from _types(kind, place) if isinstance(kind, tuple) else ((place, kind),)


def experts(columns: int) -> str:
    """Describe an expert's first product, with so many entries an item, as `expert_tiling` has it."""
    product = ExpertProduct(FIRST_GATED, 8, 128, 768, 2048, 1)
    tiling = expert_tiling(product, 2, columns)
    constants = {
        "CHOICE": choice_sizes(Choice(8, renormalised=True), 128, 0, tiling.warps),
        "OUTPUTS": 768, "DEPTH": 2048, "COLUMNS": columns, "ROWS": tiling.rows, "BLOCK": tiling.block,
        "STAGES": tiling.stages, "EVEN": True, "SCALE_ROWS": 128, "SCALE_COLUMNS": 128, "WHICH": FIRST_GATED,
        "SCALED": True, "SHARED": 0, "SQUARES": 0, "ALL_SQUARES": 1, "STRIDE": 0, "DEPENDENT": True,
    }  # fmt: skip
    made = forms_of(grouped_gemm._expert_product_kernel, constants, 90, tiling.warps, **_OF_EXPERTS)
    units = sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S+", made["ptx"])))
    return " ".join(("experts", str(columns), *units))


def main() -> None:
    for capability in CAPABILITIES:
        for rows in ROWS:
            constants = {"OUTPUTS": 1024, "DEPTH": 512, "ALONG": 4, "COLUMNS": rows, "ROWS": 64, "STAGES": 3}
            product = compiled(fp8_gemm._fp8_product_kernel, constants, capability)
            print(capability, rows, *sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S+", product))))
        dependent = capability >= 90
        finish = {
            "WIDTH": 1024, "DEPTH": 512, "ROWS": 4, "BLOCK": 1024, "SQUARES": 1, "STRIDE": 16, "STEP": 1,
            "EPILOGUE": GATED, "GELU": False,
        }  # fmt: skip
        add = finish | {"WIDTH": 1152, "ROWS": 1, "BLOCK": 2048, "EPILOGUE": ADD}
        quantize = finish | {"WIDTH": 512, "ROWS": 1, "BLOCK": 512, "SQUARES": 0, "EPILOGUE": STORE}
        left: Any = {"bias": NONE, "in_fp8": ("*fp8e4nv", "*fp32", "i32"), "following": NONE}
        for name, kernel, constants, pointers in (
            ("rows", separate_epilogue._finish_kernel, quantize, left | {"channels": NONE, "squares": NONE}),
            ("finish", separate_epilogue._finish_kernel, finish, left),
            ("add", separate_epilogue._finish_kernel, add, left | {"following": ("*bf16", "*bf16", "*fp64")}),
        ):
            ptx = compiled(kernel, constants | {"DEPENDENT": dependent}, capability, **pointers)
            assert ("griddepcontrol.wait" in ptx) == dependent, name
            print(capability, name, *sorted(set(re.findall(r"cvt\S+e4m3x2\S+", ptx))))
    for columns in (16, 128):
        print(90, experts(columns))


if __name__ == "__main__":
    main()
