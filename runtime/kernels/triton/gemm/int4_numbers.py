"""Numbers of four or eight bits become bfloat16 in registers, in the order in which the matrix units read them.

Four bits: a shift and a mask make two bfloat16 numbers 128 + q of two numbers; adding -(128 + zero point) is exact, and
the product with the scale is rounded once. A float16 scale is the sum of two bfloat16 numbers, of which the second has
three bits, so that its product with a number is exact, and one multiply-add rounds once.

Eight bits: a byte becomes the last one of a float32 number 2**23 + q. The sum with -(2**23 + zero point) and the
product with the scale are exact; the product is rounded once.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

WORDS = tl.constexpr(16)  # of 32 bits, of a row of a panel


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


def _assembly_of_bytes(half: bool) -> str:
    """Two words, $4 and $5, and their scales, $6 and $7, become four pairs of bfloat16."""
    lines = [
        ".reg .b32 packed;", ".reg .b16 low, high;", ".reg .f32 scale, zero, magic, even, odd;",
        "mov.b32 magic, 0x4b000000;",
    ]  # fmt: skip
    for word in range(2):
        lines += [
            f"and.b32 packed, ${6 + word}, 0xffff0000;",
            "mov.b32 zero, packed;",
            "sub.rn.f32 zero, zero, magic;",
            *(
                [f"mov.b32 {{low, high}}, ${6 + word};", "cvt.f32.f16 scale, low;"]
                if half
                else [f"shl.b32 packed, ${6 + word}, 16;", "mov.b32 scale, packed;"]
            ),
        ]
        for pair in range(2):
            for byte, number in ((2 * pair, "even"), (2 * pair + 1, "odd")):
                lines += [
                    f"prmt.b32 packed, ${4 + word}, 0x4b000000, 0x744{byte};",
                    f"mov.b32 {number}, packed;",
                    f"add.rn.f32 {number}, {number}, zero;",
                    f"mul.rn.f32 {number}, {number}, scale;",
                ]
            lines += [f"cvt.rn.bf16x2.f32 ${2 * word + pair}, odd, even;"]
    return "{" + " ".join(lines) + "}"


_OF_BFLOAT16, _OF_FLOAT16 = tl.constexpr(_assembly(False)), tl.constexpr(_assembly(True))
_BYTES_BFLOAT16, _BYTES_FLOAT16 = tl.constexpr(_assembly_of_bytes(False)), tl.constexpr(_assembly_of_bytes(True))


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
        a, b, c, d, e, f, g, h = found
    else:
        R: tl.constexpr = words.shape[0]
        first, second = tl.split(tl.reshape(words, [R, WORDS // 2, 2]))
        scale_first, scale_second = tl.split(tl.reshape(scale, [R, WORDS // 2, 2]))
        a = _pair(first, scale_first, 0, 16, 15, 128.0, HALF)
        b = _pair(first, scale_first, 4, 20, 15, 128.0, HALF)
        c = _pair(first, scale_first, 8, 24, 15, 128.0, HALF)
        d = _pair(first, scale_first, 12, 28, 15, 128.0, HALF)
        e = _pair(second, scale_second, 0, 16, 15, 128.0, HALF)
        f = _pair(second, scale_second, 4, 20, 15, 128.0, HALF)
        g = _pair(second, scale_second, 8, 24, 15, 128.0, HALF)
        h = _pair(second, scale_second, 12, 28, 15, 128.0, HALF)
    return a, b, c, d, e, f, g, h


@triton.jit
def decoded_bytes(words, scale, HALF: tl.constexpr, ON_GPU: tl.constexpr):
    """Return four bfloat16 tensors [R, 16]: element [r, 2 m + p] of tensor j comes from word [r, 2 m + j // 2], byte
    2 (j % 2) + p. words: int32 [R, 16]. scale: as `decoded` has it, with -zero point in the high bits."""
    if ON_GPU:
        found = tl.inline_asm_elementwise(
            _BYTES_FLOAT16 if HALF else _BYTES_BFLOAT16,
            "=r,=r,=r,=r,r,r,r,r",
            [words, scale],
            dtype=(tl.bfloat16,) * 4,
            is_pure=True,
            pack=2,
        )
        a, b, c, d = found
    else:
        R: tl.constexpr = words.shape[0]
        first, second = tl.split(tl.reshape(words, [R, WORDS // 2, 2]))
        scale_first, scale_second = tl.split(tl.reshape(scale, [R, WORDS // 2, 2]))
        a = _pair(first, scale_first, 0, 8, 255, 0.0, HALF)
        b = _pair(first, scale_first, 16, 24, 255, 0.0, HALF)
        c = _pair(second, scale_second, 0, 8, 255, 0.0, HALF)
        d = _pair(second, scale_second, 16, 24, 255, 0.0, HALF)
    return a, b, c, d


@triton.jit
def _pair(
    words, scale, low: tl.constexpr, high: tl.constexpr, mask: tl.constexpr, added: tl.constexpr, HALF: tl.constexpr
):
    """Dequantize each word's bits of `mask` from `low` on and from `high` on: [R, 2 n] of [R, n]. added: to each zero
    point."""
    R: tl.constexpr = words.shape[0]
    n: tl.constexpr = words.shape[1]
    numbers = tl.join(words >> low & mask, words >> high & mask).to(tl.float32)
    zero = (scale & -65536).to(tl.float32, bitcast=True)
    if HALF:
        factor = (scale & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        factor = (scale << 16).to(tl.float32, bitcast=True)
    return tl.reshape(((numbers + (added + zero)[:, :, None]) * factor[:, :, None]).to(tl.bfloat16), [R, 2 * n])


@triton.jit
def joined(parts):
    """Join the eight tensors of `decoded` as [R, 16, 2, 2, 2]: the last dimensions are a word of two, a step of 16,
    and a half of it."""
    a, b, c, d, e, f, g, h = parts
    return tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))


@triton.jit
def operand_of(low, high, of_low, of_high, BITS: tl.constexpr, HALF: tl.constexpr, ON_GPU: tl.constexpr):
    """Dequantize panels as the left operand of the matrix units, bfloat16 [2 R, columns of a panel]. low, high: words,
    int32 [R, 16], of eight rows and of the next eight, for each warp. of_low, of_high: their scales."""
    WARPS: tl.constexpr = low.shape[0] // 8
    if BITS == 4:
        low_parts = joined(decoded(low, of_low, HALF, ON_GPU))
        high_parts = joined(decoded(high, of_high, HALF, ON_GPU))
        # Warps, rows, then of a row: threads, pairs of words, pairs of columns, words, steps, halves; low or high.
        parts = tl.reshape(tl.join(low_parts, high_parts), [WARPS, 8, 4, 2, 2, 2, 2, 2, 2])
        made = tl.reshape(tl.permute(parts, (0, 8, 1, 3, 5, 6, 7, 2, 4)), [WARPS * 16, 128])
    else:
        a, b, c, d = decoded_bytes(low, of_low, HALF, ON_GPU)
        e, f, g, h = decoded_bytes(high, of_high, HALF, ON_GPU)
        low_bytes = tl.join(tl.join(a, c), tl.join(b, d))
        high_bytes = tl.join(tl.join(e, g), tl.join(f, h))
        # The same without steps, since a word has one.
        parts = tl.reshape(tl.join(low_bytes, high_bytes), [WARPS, 8, 4, 2, 2, 2, 2, 2])
        made = tl.reshape(tl.permute(parts, (0, 7, 1, 3, 5, 6, 2, 4)), [WARPS * 16, 64])
    return made


@triton.jit
def rows_of(words, scale, BITS: tl.constexpr, HALF: tl.constexpr, ON_GPU: tl.constexpr):
    """Dequantize rows of panels, bfloat16 [R, columns of a panel]. words: int32 [R, 16]."""
    R: tl.constexpr = words.shape[0]
    if BITS == 4:
        parts = tl.reshape(joined(decoded(words, scale, HALF, ON_GPU)), [R, 4, 2, 2, 2, 2, 2])
        made = tl.reshape(tl.permute(parts, (0, 2, 4, 5, 6, 1, 3)), [R, 128])
    else:
        a, b, c, d = decoded_bytes(words, scale, HALF, ON_GPU)
        parts = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [R, 4, 2, 2, 2, 2])
        made = tl.reshape(tl.permute(parts, (0, 2, 4, 5, 1, 3)), [R, 64])
    return made


@triton.jit
def scales_of(at, GROUPS: tl.constexpr, STRIDE: tl.constexpr):
    """Load the scale of each word of a panel's row, [R, 16]. at: the first group's scales, [R, 1]. GROUPS: of a panel's
    columns. STRIDE: scales of a group."""
    R: tl.constexpr = at.shape[0]
    found = tl.broadcast_to(tl.load(at), [R, WORDS])
    word = tl.arange(0, WORDS)[None, :] % 4
    for g in tl.static_range(1, GROUPS):
        found = tl.where(word < g * (4 // GROUPS), found, tl.broadcast_to(tl.load(at + g * STRIDE), [R, WORDS]))
    return found
