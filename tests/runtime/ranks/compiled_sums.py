"""`python -m tests.runtime.ranks.compiled_sums` prints the PTX of a sum over ranks, launched programmatically."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runahead.runtime.kernels.triton.ranks import push_exchange
from runahead.runtime.kernels.triton.ranks.waits import WaitWords

RANKS = 2
CONSTANTS: dict[str, Any] = {
    "WIDTH": 1024, "PARTS": 4, "RANK": 1, "RANKS": RANKS, "BLOCK": 1024, "ADDS": True, "DIVIDED": False,
    "DEPENDENT": True,
}  # fmt: skip
ADDRESSES: Any = ("*i64",) * 3
WORDS = {
    "squares": "*fp64", "peers": ("*i16",) * RANKS, "steps": "*i32", "n": "i32", "stride": "i32",
    "wait_words": WaitWords(*ADDRESSES),
}  # fmt: skip


def ptx() -> str:
    kernel: Any = push_exchange._reduce_kernel
    names = kernel.arg_names
    signature = {name: "constexpr" if name in CONSTANTS else WORDS.get(name, "*bf16") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in CONSTANTS.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    print(ptx())
