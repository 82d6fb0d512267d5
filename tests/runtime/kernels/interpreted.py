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


@triton.jit
def _accesses(x, halves, numbers, flags, out, out_halves, out_numbers, out_flags, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads and stores, selections and conversions of each kind: of one number or several, with and without a mask."""
    i, row = tl.arange(0, N), tl.program_id(0)
    some, one, column = i < N - 3, row < 1, tl.arange(0, 4)[:, None]
    whole = tl.load(x + i, mask=some, other=-0.0)
    wide = tl.load(x + column + i[None, :], mask=(i < 5)[None, :], other=float("-inf"))
    tall = tl.load(x + i[None, :], mask=column < 2, other=1.5)
    least = tl.load(x + i, mask=one, other=2)
    single, nothing = tl.load(x + row), tl.load(x + row, mask=row > 1, other=-0.0)
    half = tl.load(halves + i, mask=some, other=3.0)
    number = tl.load(numbers + i, mask=some, other=-1)
    flag = tl.load(flags + i, mask=some, other=0)
    told = tl.load(flags + i)
    tl.store(out + i, whole, mask=some)
    tl.store(out + N + i, tl.where(told, tl.maximum(whole, 0.0), tl.minimum(single, whole)))
    tl.store(out + 2 * N + i, -0.0, mask=flag)
    tl.store(out + 3 * N + row, single + nothing)
    tl.store(out + 3 * N + 2, 2, mask=one)
    tl.store(out + 4 * N + i, row, mask=one)
    tl.store(out + (5 + column) * N + i[None, :], tl.where(wide > tall, wide, 0.25) + tl.full((4, N), 1.25, tl.float32))
    tl.store(out + (9 + column) * N + i[None, :], tl.sum(tall, 0)[None, :])
    tl.store(out + 13 * N + i, tl.where(one, least, single) + tl.full((N,), -0.0, tl.float32))
    tl.store(out_halves + i, tl.where(told, whole, 1.0))
    tl.store(out_halves + N + i, half.to(tl.float32) * 3)
    tl.store(out_halves + 2 * N + i, number)
    tl.store(out_numbers + i, tl.where(number > 0, number, 7).to(tl.int64) - tl.maximum(number.to(tl.int64), row))
    tl.store(out_numbers + N + i, number.to(tl.uint32))
    tl.store(out_numbers + 2 * N + i, number.to(tl.int8).to(tl.int32) + told.to(tl.int32) + (single * 8).to(tl.int32))
    tl.store(out_numbers + 3 * N + i, tl.minimum(number.to(tl.uint32), 99).to(tl.float32).to(tl.int64))
    shifted = tl.maximum(number, number >> 1, tl.PropagateNan.ALL) + tl.load(numbers + i, some, 4)
    tl.store(out_numbers + i, tl.load(out_numbers + i) + shifted, some)
    tl.store(out_flags + i, (number & 1).to(tl.int1) | (whole > 0), mask=some)


def digest() -> str:
    """Of all that the kernels leave, bit by bit."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    halves = torch.randn(ROWS, COLUMNS, generator=generator).bfloat16()
    numbers = torch.randint(-(1 << 31), 1 << 31, (ROWS, COLUMNS), generator=generator).int()
    out, out_halves = torch.zeros(2 * ROWS), torch.zeros_like(halves)
    out_numbers = torch.zeros(ROWS, COLUMNS, dtype=torch.int64)
    _everything[(2,)](x, halves, numbers, out, out_halves, out_numbers, ROWS, COLUMNS)
    accessed = torch.full((14, COLUMNS), 9.0), torch.zeros(3, COLUMNS).bfloat16(), out_numbers[:4].clone()
    flags, out_flags = torch.rand(COLUMNS, generator=generator) < 0.5, torch.zeros(COLUMNS, dtype=torch.bool)
    _accesses[(2,)](x, halves, numbers, flags, *accessed, out_flags, COLUMNS)
    assert out_flags.any() and not out_flags.all()
    tensors = (out, out_halves, out_numbers, *accessed)
    left = [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]
    assert all(len(set(one)) > 8 for one in left), "as if nothing had been computed"
    left.append(out_flags.numpy().tobytes())
    return hashlib.sha256(b"".join(left)).hexdigest()


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")  # NumPy, of integers that wrap
    print(digest())
