"""Numbers of four bits become bfloat16 in registers, in the order in which the matrix units read them.

A shift and a mask make two bfloat16 numbers 128 + q of two numbers; adding -(128 + zero point) is exact, and the
product with the scale is rounded once. A float16 scale is the sum of two bfloat16 numbers, of which the second has
three bits, so that its product with a number is exact, and one multiply-add rounds once.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.quantized_weight import PANEL_COLUMNS
from runahead.runtime.kernels.triton.gpu.unrolled import longer

WORDS = tl.constexpr(PANEL_COLUMNS // 8)  # of 32 bits, of a row of a panel


def _assembly(half: bool) -> str:
    """Two words, $8 and $9, and their scales, $10 and $11, as `decoded` has them, become eight pairs of bfloat16."""
    lines = [
        ".reg .b32 scale, rest, zero, one, minus, t, u;",
        ".reg .b16 low, high;",
        ".reg .f32 f, g;",
        "mov.b32 one, 0x3f803f80;",
        "mov.b32 minus, 0x80008000;",  # zeros that change no product's sign
        "mov.b32 u, minus;",
    ]
    for word in range(2):
        packed = f"${10 + word}"
        if half:  # the sum of `scale` and `rest`
            lines += [
                f"mov.b32 {{low, high}}, {packed};",
                "cvt.f32.f16 f, low;",
                "cvt.rn.bf16x2.f32 scale, f, f;",
                "shl.b32 t, scale, 16;",
                "mov.b32 g, t;",
                "sub.rn.f32 f, f, g;",
                "cvt.rn.bf16x2.f32 rest, f, f;",
            ]
        else:
            lines += [f"prmt.b32 scale, {packed}, 0, 0x1010;"]
        lines += [f"prmt.b32 zero, {packed}, 0, 0x3232;"]
        for number in range(4):
            lines += [
                f"shr.u32 t, ${8 + word}, {4 * number};",
                "lop3.b32 t, t, 0x000f000f, 0x43004300, 0xEA;",
                "fma.rn.bf16x2 t, t, one, zero;",
                *(["fma.rn.bf16x2 u, t, rest, minus;"] if half else []),
                f"fma.rn.bf16x2 ${4 * word + number}, t, scale, u;",
            ]
    return "{" + " ".join(lines) + "}"


_OF_BFLOAT16, _OF_FLOAT16 = tl.constexpr(_assembly(False)), tl.constexpr(_assembly(True))


@triton.jit
def decoded(words, scale, HALF: tl.constexpr, ON_GPU: tl.constexpr):
    """Return eight bfloat16 tensors [R, 16]: element [r, 2 m + p] of tensor j comes from word [r, 2 m + j // 4],
    the four bits from 4 (j % 4) + 16 p on. words: int32 [R, 16]. scale: of each word, bfloat16 (HALF: float16) in the
    low bits, and -(128 + zero point) as bfloat16 in the high ones."""
    if ON_GPU:
        found = tl.inline_asm_elementwise(
            _OF_FLOAT16 if HALF else _OF_BFLOAT16,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
            [words, scale],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        R: tl.constexpr = words.shape[0]
        zero = 128.0 + (scale & -65536).to(tl.float32, bitcast=True)
        if HALF:
            factor = (scale & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            factor = (scale << 16).to(tl.float32, bitcast=True)
        of_first, of_second = (), ()  # words of two
        for shift in tl.static_range(0, 16, 4):
            numbers = tl.join(words >> shift & 15, words >> (shift + 16) & 15).to(tl.float32)
            made = ((numbers + zero[:, :, None]) * factor[:, :, None]).to(tl.bfloat16)
            first, second = tl.split(tl.permute(tl.reshape(made, [R, WORDS // 2, 2, 2]), (0, 1, 3, 2)))
            of_first = longer(of_first, tl.reshape(first, [R, WORDS]))
            of_second = longer(of_second, tl.reshape(second, [R, WORDS]))
        found = of_first + of_second
    return found


@triton.jit
def scales_of(at, GROUPS: tl.constexpr, STRIDE: tl.constexpr):
    """Load the scale of each word of 128 columns, [R, 16]. at: the first group's scales, [R, 1]. GROUPS: of 128
    columns. STRIDE: scales of a group."""
    R: tl.constexpr = at.shape[0]
    found = tl.broadcast_to(tl.load(at), [R, WORDS])
    word = tl.arange(0, WORDS)[None, :] % 4
    for g in tl.static_range(1, GROUPS):
        found = tl.where(word < g * (4 // GROUPS), found, tl.broadcast_to(tl.load(at + g * STRIDE), [R, WORDS]))
    return found
