"""Functions of `triton.language` for Triton's interpreter in their usual cases, without the calls that find out which
case it is. They return the same; `otherwise` is the function itself, for all other cases.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from triton import language as tl
from triton.runtime import interpreter

Function = Callable[..., Any]
# Of these NumPy computes in the type itself, as a GPU does.
TYPES: Final[dict[str, Any]] = {
    "int32": np.int32,
    "int64": np.int64,
    "uint32": np.uint32,
    "fp32": np.float32,
}  # by Triton's name
_LIMITS: Final = {
    kind: (int(np.iinfo(kind).min), int(np.iinfo(kind).max)) for kind in TYPES.values() if kind is not np.float32
}
_INTEGERS: Final = ("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS: Final = ("fp16", "bf16", "fp32", "fp64")
_SIZES: Final = {
    "int1": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "fp16": 2, "bf16": 2, "int32": 4, "uint32": 4, "fp32": 4,
    "int64": 8, "uint64": 8, "fp64": 8,
}  # fmt: skip
_KEPT: Final = 4096  # the largest array that is kept for the next time, in elements


def bytes_of(element: Any) -> int:
    """Return the size of an element of this type in memory."""
    return _SIZES.get(element.name) or max(1, int(element.primitive_bitwidth) // 8)


def number_of(dtype: Any, number: float, pointers: bool) -> Any:
    """A number of this type, or of elements behind a pointer the bytes; None where Triton is to say what comes out."""
    kind = TYPES.get(dtype.name)
    if kind is np.float32:
        return np.float32(number or 0.0)  # Triton makes +0.0 of -0.0
    if type(number) is not int:
        return None
    if kind is not None:
        least, most = _LIMITS[kind]
        return kind(number) if least <= number <= most else None
    if pointers and dtype.is_ptr() and abs(number) < 1 << 31:
        return np.uint64(number * bytes_of(dtype.element_ty) % (1 << 64))
    return None


_blocks: Final[dict[tuple[int, tuple[int, ...]], Any]] = {}  # each keeps its element's type, which has this id


def block_of(element: Any, shape: tuple[int, ...]) -> Any:
    """The type of a tensor of this shape, made once."""
    key = id(element), shape
    found = _blocks.get(key)
    if found is None:
        found = _blocks[key] = tl.block_type(element, list(shape))
    return found


def quick_functions() -> dict[Function, Callable[[Function], Function]]:
    """Functions of the language, and what makes a quick one of what the interpreter calls otherwise. Before the
    interpreter has replaced any."""
    makers: dict[str, Callable[[Function], Function]] = {
        "load": _load,
        "store": _store,
        "where": _where,
        "full": _full,
        "maximum": functools.partial(_extreme, np.maximum),
        "minimum": functools.partial(_extreme, np.minimum),
    }
    return {getattr(tl.core, name).__wrapped__: maker for name, maker in makers.items()}


def cast_at_once(cast: Function) -> Function:
    """Return a `semantic.cast` that finds out once for each pair of types what there is to do."""
    tensor, builder = tl.tensor, interpreter.interpreter_builder
    methods: dict[tuple[str, str], str | None] = {}

    def called(self: Any, given: Any, wanted: Any, rounding: Any = None) -> Any:
        of, to = given.dtype, wanted.scalar
        pair = of.name, to.name
        if of is to or pair[0] == pair[1]:
            return given
        if pair not in methods:
            methods[pair] = _method_of(*pair)
        method = methods[pair]
        if method is None or rounding is not None:
            return cast(self, given, wanted, rounding)
        type = given.type.with_element_ty(to) if given.type.is_block() else to
        more = (pair[0][0] != "u" and pair[0] != "int1",) if method == "create_int_cast" else ()
        return tensor(getattr(builder, method)(given.handle, type, *more), type)

    return called


def _method_of(given: str, wanted: str) -> str | None:
    """Name the builder's method that converts these numbers; None: it takes several."""
    if given in _INTEGERS and wanted in _INTEGERS:
        return None if wanted == "int1" else "create_int_cast"
    if given in _INTEGERS and wanted in _FLOATS:
        return "create_ui_to_fp" if given[0] == "u" or given == "int1" else "create_si_to_fp"
    half = ("fp16", "bf16")
    if given in _FLOATS and wanted in _FLOATS and (given not in half or wanted == "fp32"):
        return "create_fp_trunc" if _SIZES[given] > _SIZES[wanted] else "create_fp_ext"
    return None


def load_at_once() -> None:
    """Replace the builder's load, which makes an array of zeros for each."""
    builder, access, handle_of = interpreter.InterpreterBuilder, interpreter._interpreter, interpreter.TensorHandle

    def load(self: Any, pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
        element, addresses = pointers.get_element_ty(), pointers.data
        dtype = interpreter._get_np_dtype(element)
        if other is None:
            instead = _filled(addresses.shape, 0, np.dtype(dtype))
        else:
            instead = other.data
        return handle_of(access.load(addresses, mask.data, instead, dtype), element)

    builder.create_masked_load = load


@functools.cache
def _kept(shape: tuple[int, ...], number: Any, dtype: np.dtype[Any]) -> Any:
    array = np.full(shape, number, dtype=dtype)
    array.flags.writeable = False
    return array


def _filled(shape: tuple[int, ...], number: Any, dtype: np.dtype[Any]) -> Any:
    """Return a constant array. number: not -0.0. A NaN, which equals none, is not kept."""
    if math.prod(shape) > _KEPT or number != number:
        return np.full(shape, number, dtype=dtype)
    return _kept(shape, number, dtype)


_BOOL: Final = np.dtype(np.bool_)


def _masked(pointer: Any, mask: Any) -> tuple[Any, Any, Any] | None:
    """Addresses and mask, of one shape, and the addresses' type; None where Triton is to say what comes out."""
    addresses, of = pointer.handle.data, pointer.type
    if mask is None:
        return addresses, _filled(addresses.shape, True, _BOOL), of
    if type(mask) is not tl.tensor or mask.dtype is not tl.int1:
        return None
    passes = mask.handle.data
    if passes.shape == addresses.shape and mask.type.is_block() == of.is_block():
        return addresses, passes, of
    if not of.is_block():
        return None
    if not mask.type.is_block():
        return addresses, _filled(addresses.shape, bool(passes[0]), _BOOL), of
    if passes.ndim != addresses.ndim:
        return None
    shape = tuple([max(pair) for pair in zip(passes.shape, addresses.shape, strict=True)])
    if passes.shape != shape:
        passes = np.broadcast_to(passes, shape)
    if addresses.shape != shape:
        addresses, of = np.broadcast_to(addresses, shape), block_of(pointer.dtype, shape)
    return addresses, passes, of


def _is_plain(pointer: Any, options: dict[str, Any]) -> bool:
    """A tensor of pointers, or one pointer, to numbers that NumPy knows; options that the interpreter passes over."""
    if type(pointer) is not tl.tensor or not pointer.dtype.is_ptr() or pointer.dtype.element_ty.name not in _SIZES:
        return False
    return not options or all(
        name == "volatile" or (name == "cache_modifier" and value == ".cg") for name, value in options.items()
    )


def _load(otherwise: Function) -> Function:
    tensor, handle_of, builder = tl.tensor, interpreter.TensorHandle, interpreter.interpreter_builder
    bytes_at = tl.pointer_type(tl.int8)

    def called(pointer: Any, mask: Any = None, other: Any = None, *more: Any, **options: Any) -> Any:
        found = _masked(pointer, mask) if not more and _is_plain(pointer, options) else None
        if found is None:
            return otherwise(pointer, mask, other, *more, **options)
        addresses, passes, of = found
        element = pointer.dtype.element_ty
        instead = None
        if other is not None and not (type(other) in (int, float) and other == 0):
            number = number_of(element, other, False) if type(other) in (int, float) else None
            if number is None or mask is None:
                return otherwise(pointer, mask=mask, other=other, **options)
            instead = handle_of(_filled(addresses.shape, number, number.dtype), element)
        at = handle_of(addresses, bytes_at if element is tl.int1 else pointer.dtype)
        loaded = builder.create_masked_load(at, handle_of(passes, tl.int1), instead, None, None, False)
        if element is tl.int1:
            loaded = handle_of(loaded.data != 0, tl.int1)
        return tensor(loaded, of.with_element_ty(element) if of.is_block() else element)

    return called


def _store(otherwise: Function) -> Function:
    tensor, handle_of, builder = tl.tensor, interpreter.TensorHandle, interpreter.interpreter_builder
    semantic = interpreter.interpreter_semantic

    def called(pointer: Any, value: Any, mask: Any = None, *more: Any, **options: Any) -> Any:
        found = _masked(pointer, mask) if not more and _is_plain(pointer, options) else None
        if found is None or pointer.dtype.element_ty is tl.int1:
            return otherwise(pointer, value, mask, *more, **options)
        addresses, passes, of = found
        element, shape = pointer.dtype.element_ty, addresses.shape
        number = number_of(element, value, False) if type(value) in (int, float) else None
        if number is not None:
            data = _filled(shape, number, number.dtype)
        elif type(value) is not tensor or shape != pointer.handle.data.shape:
            return otherwise(pointer, value, mask=mask, **options)
        else:
            data = (value if value.dtype is element else semantic.cast(value, element)).handle.data
            if value.type.is_block() and (data.ndim != len(shape) or not of.is_block()):
                return otherwise(pointer, value, mask=mask, **options)
            if data.shape != shape:
                if any(m not in (1, n) for m, n in zip(data.shape, shape[-data.ndim :], strict=True)):
                    return otherwise(pointer, value, mask=mask, **options)
                data = np.broadcast_to(data, shape)
        at = handle_of(addresses, pointer.dtype)
        return tensor(
            builder.create_masked_store(at, handle_of(data, element), handle_of(passes, tl.int1), None, None), tl.void
        )

    return called


def _pair(one: Any, other: Any) -> tuple[Any, Any, Any, Any] | None:
    """Data of two operands, of which one may be a number, their scalar type, and a tensor, the block if one is; None
    where Triton is to say what comes out."""
    tensor = tl.tensor
    if type(one) is tensor:
        dtype = one.dtype
        if dtype.name not in TYPES:
            return None
        if type(other) is tensor:
            if other.dtype is not dtype:
                return None
            return one.handle.data, other.handle.data, dtype, other if other.type.is_block() else one
        number = number_of(dtype, other, False) if type(other) in (int, float) else None
        return None if number is None else (one.handle.data, number, dtype, one)
    if type(other) is not tensor or type(one) not in (int, float) or other.dtype.name not in TYPES:
        return None
    number = number_of(other.dtype, one, False)
    return None if number is None else (number, other.handle.data, other.dtype, other)


def _shaped(data: Any, dtype: Any, *operands: Any) -> Any:
    """A tensor with its data's shape. operands: its blocks have as many dimensions."""
    like = next((one for one in operands if one.type.is_block()), None)
    if like is None:
        return tl.tensor(interpreter.TensorHandle(data, dtype), dtype)
    same = like.dtype is dtype and like.handle.data.shape == data.shape
    return tl.tensor(interpreter.TensorHandle(data, dtype), like.type if same else block_of(dtype, data.shape))


def _ranks_differ(*operands: Any) -> bool:
    return len({one.handle.data.ndim for one in operands if type(one) is tl.tensor and one.type.is_block()}) > 1


def _where(otherwise: Function) -> Function:
    def called(condition: Any, x: Any, y: Any, **options: Any) -> Any:
        if type(condition) is tl.tensor and condition.dtype is tl.int1:
            found = _pair(x, y)
            if found is not None and not _ranks_differ(condition, x, y):
                one, other, dtype, like = found
                return _shaped(np.where(condition.handle.data, one, other), dtype, like, condition)
        return otherwise(condition, x, y, **options)

    return called


def _extreme(compute: np.ufunc, otherwise: Function) -> Function:
    def called(x: Any, y: Any, *options: Any, **named: Any) -> Any:
        found = None if options or named else _pair(x, y)
        if found is None or _ranks_differ(x, y):
            return otherwise(x, y, *options, **named)
        one, other, dtype, like = found
        return _shaped(compute(one, other), dtype, like)

    return called


def _full(otherwise: Function) -> Function:
    def called(shape: Any, value: Any, dtype: Any, **options: Any) -> Any:
        number = number_of(dtype, value, False) if type(value) in (int, float) and type(dtype) is tl.dtype else None
        sizes = tuple(shape) if type(shape) in (tuple, list) else ()
        if number is None or not sizes or any(type(size) is not int for size in sizes):
            return otherwise(shape, value, dtype, **options)
        data = _filled(sizes, number, number.dtype)
        return tl.tensor(interpreter.TensorHandle(data, dtype), block_of(dtype, sizes))

    return called
