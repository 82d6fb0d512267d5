"""A kernel that names memory of nobody's fails with a sentence, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="nothing is interpreted here")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

SIZE = 8


@triton.jit
def _moves(source, target, first, count, OP: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 8)
    if OP == "reads":
        tl.store(target + i, tl.load(source + first + i, mask=i < count))
    elif OP == "writes":
        tl.store(target + first + i, tl.load(source + i), mask=i < count)
    elif OP == "changes":
        tl.atomic_add(target + first + i, tl.load(source + i), mask=i < count)
    else:
        tl.atomic_cas(target + first, 0, 1)


@pytest.mark.parametrize("does", ["reads", "writes", "changes", "exchanges"])
def test_an_address_outside_of_every_tensor_is_an_error(does: str) -> None:
    source, target = torch.arange(SIZE, dtype=torch.int32), torch.zeros(SIZE, dtype=torch.int32)
    far = 1 << 28  # numbers away, which is a gigabyte
    for first, count in ((0, SIZE), (far, 0) if does != "exchanges" else (SIZE - 1, 0)):
        _moves[(1,)](source, target, first, count, OP=does)
    for first in (-far, far):
        with pytest.raises(Exception, match=f"_moves {does} 4 bytes that no tensor of it has"):
            _moves[(1,)](source, target, first, SIZE, OP=does)
