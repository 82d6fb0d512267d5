"""A kernel with a little of everything, for Triton's interpreter. `python -m tests.runtime.kernels.interpreted`, with
TRITON_INTERPRET=1, prints the digest of what it computes by the interpreter as Triton has it.
"""

from __future__ import annotations

import hashlib

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 8, 16


@triton.jit
def _everything(x, halves, numbers, out, out_halves, out_numbers, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scalars, vectors, tiles; 16, 32 and 64 bits; sums, a product of matrices, masks, a loop, integers that wrap."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    place = row * COLUMNS + column
    tile = tl.load(x + place, mask=column < COLUMNS - 3, other=-1.0)
    half = tl.load(halves + place).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(tl.program_id(0) + 2):
        total += tl.where(place % 3 == step, tl.exp(-tile * tile), half / (step + 1.5))
    mixed = tl.dot(total, tl.trans(half))
    tl.store(out + tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.sum(total, 1) + tl.max(mixed, 1))
    tl.store(out_halves + place, (total * 3).to(tl.bfloat16))
    number = tl.load(numbers + place)
    wrapped = number * 1_664_525 + 1_013_904_223
    pointer, scalar = x + COLUMNS, tl.load(numbers + 3)
    last = tl.load(pointer + 2 + (place - 5), mask=(place >= 5) & (place <= 9) | (place > 90) & (place < 99), other=0.0)
    total += (2.5 - last) * 0.5 + 3 * last + (1 + tl.where((last != 0.5) | (scalar <= number), last, 7 - last))
    total += tl.where(last > 0.5, last, 0.25) - tl.where(scalar > 0, 1.5, last) + tl.where(last < 0, 2, total)[:, :]
    total += tl.where(tl.arange(0, ROWS) < 3, tl.arange(0, ROWS), -5)[:, None].to(tl.float32)
    tl.store(out_halves + place, (total * 3).to(tl.bfloat16))
    wide = (number.to(tl.int64) << 33) ^ wrapped.to(tl.uint32).to(tl.int64)
    tl.store(out_numbers + place, wide // 7 - (wide % 7) + (wrapped >> 3))


def digest() -> str:
    """Of all that the kernel leaves, bit by bit."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    halves = torch.randn(ROWS, COLUMNS, generator=generator).bfloat16()
    numbers = torch.randint(-(1 << 31), 1 << 31, (ROWS, COLUMNS), generator=generator).int()
    out, out_halves = torch.zeros(2 * ROWS), torch.zeros_like(halves)
    out_numbers = torch.zeros(ROWS, COLUMNS, dtype=torch.int64)
    _everything[(2,)](x, halves, numbers, out, out_halves, out_numbers, ROWS, COLUMNS)
    left = [tensor.view(torch.uint8).numpy().tobytes() for tensor in (out, out_halves, out_numbers)]
    assert len(set(left[0])) > 8 and len(set(left[1])) > 8 and len(set(left[2])) > 8, "as if nothing had been computed"
    return hashlib.sha256(b"".join(left)).hexdigest()


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")  # NumPy, of integers that wrap
    print(digest())
