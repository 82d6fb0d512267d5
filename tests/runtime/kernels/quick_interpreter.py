"""Triton's interpreter without what it computes in vain or again and again, which is most of its time. It says the
same.

All of this is Triton's own affair, as the version that constraints.txt names has it. Where another version lacks
something of it the interpreter stays as it is, and tests are slower.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from triton import language as tl
from triton.language.core import validate_block_shape
from triton.runtime import interpreter

from tests.runtime.kernels.quick_functions import (
    TYPES,
    block_of,
    bytes_of,
    cast_at_once,
    load_at_once,
    number_of,
    quick_functions,
)

MARK = "runahead_made_it_quick"
OFFSETS: Final = ("int32", "int64")


class Operation(NamedTuple):
    """Of a tensor's operator. of_bits: takes logical values, too. compares: returns them. reversed: the tensor is the
    second operand."""

    compute: np.ufunc
    of_bits: bool = False
    compares: bool = False
    reversed: bool = False


OPERATORS: Final = {
    "__add__": Operation(np.add),
    "__radd__": Operation(np.add, reversed=True),
    "__sub__": Operation(np.subtract),
    "__rsub__": Operation(np.subtract, reversed=True),
    "__mul__": Operation(np.multiply),
    "__rmul__": Operation(np.multiply, reversed=True),
    "__lt__": Operation(np.less, compares=True),
    "__le__": Operation(np.less_equal, compares=True),
    "__gt__": Operation(np.greater, compares=True),
    "__ge__": Operation(np.greater_equal, compares=True),
    "__eq__": Operation(np.equal, compares=True),
    "__ne__": Operation(np.not_equal, compares=True),
    "__and__": Operation(np.bitwise_and, of_bits=True),
    "__or__": Operation(np.bitwise_or, of_bits=True),
}


class _StaysPatched:
    """What the interpreter puts in the place of `triton.language` stays there."""

    def restore(self) -> None:
        pass


def _patch_once() -> None:
    """The interpreter replaces every function of `triton.language` that a function sees at each call of it, and puts
    them back. Nothing is compiled in this process, so once is enough for each function."""
    patch = interpreter._patch_lang
    patched: set[Any] = set()

    def patch_once(function: Any) -> _StaysPatched:
        if function not in patched:
            patch(function)
            patched.add(function)
        return _StaysPatched()

    interpreter._patch_lang = patch_once


def _look_for_no_overflow() -> None:
    """Of each sum and product of integers the interpreter computes whether it leaves the type; it says so in its debug
    mode alone, which is off."""
    options = interpreter.interpreter_builder.options
    assert not options.debug
    object.__setattr__(options, "sanitize_overflow", False)  # it is frozen


def _make_each_shape_once() -> None:
    """A type's shape is a tuple of Triton's, each entry with a type of its own; a tensor's shape is another one."""
    core, constexpr = tl.core, tl.constexpr
    shapes: dict[tuple[int, ...], tuple[Any, int, Any, Any]] = {}

    def made(sizes: tuple[int, ...]) -> tuple[Any, int, Any, Any]:
        numel = validate_block_shape(sizes)
        return core.tuple(sizes), numel, core.tuple([constexpr(size) for size in sizes]), constexpr(numel)

    def init_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        sizes = tuple([size.value if isinstance(size, constexpr) else size for size in shape])
        known = shapes.get(sizes)
        if known is None:
            if not sizes:
                raise TypeError("0d block_type is forbidden")
            known = shapes[sizes] = made(sizes)
        self.element_ty, self._sizes = element_ty, sizes
        self.shape, self.numel, self._tensor_shape, self._tensor_numel = known

    none, one = core.tuple([]), constexpr(1)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            self.shape, self.numel = type._tensor_shape, type._tensor_numel
        else:
            self.shape, self.numel = none, one

    core.block_type.__init__ = init_type
    core.block_type.with_element_ty = lambda self, scalar: block_of(scalar, self._sizes)
    core.block_type.to_ir = lambda self, builder: self  # as which the interpreter's builder would make it again
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = init_tensor


def _match_operands_once() -> None:
    """Of two operands the interpreter finds the type of the result, and makes both of that type and of one shape. Where
    they are so already nothing is left to do; and a number of Python's beside a tensor is the same tensor each time."""
    semantic = type(interpreter.interpreter_semantic)
    match, tensor = semantic.binary_op_type_checking_impl, tl.tensor
    numbers: dict[tuple[Any, ...], Any] = {}

    def match_once(
        self: Any, lhs: Any, rhs: Any, left_ptr: bool = False, right_ptr: bool = False, arithmetic: bool = True,
        division: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        key = None
        if isinstance(lhs, tensor):
            dtype = lhs.dtype
            if isinstance(rhs, tensor):
                if dtype is rhs.dtype and not dtype.is_ptr() and not (division and dtype.name in ("fp16", "bf16")):
                    return self.broadcast_impl_value(lhs, rhs)
            elif type(rhs) in (int, float) and lhs.numel.value <= 4096:
                shape = id(lhs.type.shape) if lhs.type.is_block() else 0  # each is made once, and kept
                key = (type(rhs), rhs, dtype.name, shape, left_ptr, arithmetic, division)
                if key in numbers:
                    return lhs, numbers[key]
        left, right = match(self, lhs, rhs, left_ptr, right_ptr, arithmetic, division)
        if key is not None and left is lhs:
            if len(numbers) >= 2000:
                numbers.clear()
            numbers[key] = right
        return left, right

    semantic.binary_op_type_checking_impl = match_once
    broadcast = semantic.broadcast_impl_value

    def of_shape(builder: Any, one: Any, sizes: list[int]) -> Any:
        of, type = one.type, block_of(one.dtype, tuple(sizes))
        if of.is_block():
            return one if of.shape is type.shape else tensor(builder.create_broadcast(one.handle, sizes), type)
        return tensor(builder.create_splat(type, one.handle), type)

    def broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left = lhs.type.shape.values if lhs.type.is_block() else []
        right = rhs.type.shape.values if rhs.type.is_block() else []
        if left == right:
            return lhs, rhs
        sizes = left or right
        if left and right:
            if len(left) != len(right):
                return broadcast(self, lhs, rhs)
            sizes = [max(pair) for pair in zip(left, right, strict=True)]
            if any(m != n and 1 not in (m, n) for m, n in zip(left, right, strict=True)):
                return broadcast(self, lhs, rhs)  # which says why they do not go together
        return of_shape(self.builder, lhs, sizes), of_shape(self.builder, rhs, sizes)

    semantic.broadcast_impl_value = broadcast_if_needed
    semantic.cast = cast_at_once(semantic.cast)


def _make_handles_without_ado() -> None:
    """Each looks whether its numbers are no wider than its type."""

    def init(self: Any, data: Any, dtype: Any, attr: dict[Any, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    interpreter.TensorHandle.__init__ = init


def _look_types_up() -> None:
    original = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def np_dtype(of: Any) -> Any:
        scalar = of.scalar
        if scalar.is_ptr():
            return original(scalar)
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = original(scalar)
        return found

    interpreter._get_np_dtype = np_dtype
    equal = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _call_with_less_ado() -> None:
    """Functions of the language are called through two others, which look for an argument that is put there."""
    semantic, quick, arange = interpreter.interpreter_semantic, quick_functions(), tl.arange.__wrapped__

    def put(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def called(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        operation = OPERATORS.get(name) if place is tl.tensor else None
        if operation is not None:
            called = _computed_at_once(operation, called)
        elif place is tl.tensor and name == "__getitem__":
            called = _indexed_at_once(called)
        elif place is tl.tensor and name == "to":
            called = _converted_at_once(called)
        elif function in quick and place is not tl.tensor:
            called = quick[function](called)
        elif function is arange:
            called = functools.cache(called)  # by its ends; nothing changes a tensor
        scope.set_attr(place, name, called)

    interpreter._patch_attr = put


def _computed_at_once(operation: Operation, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of tensors whose operands are of one type already, or a tensor and a number that this type has:
    NumPy gives both one shape, by Triton's rules. otherwise: the operator, for all other operands."""
    tensor, handle_of, pointers = tl.tensor, interpreter.TensorHandle, operation.compute is np.add
    compute, of_bits, constexpr = operation.compute, operation.of_bits, tl.constexpr

    def called(left: Any, right: Any) -> Any:
        if type(right) is constexpr:
            right = right.value
        dtype, number = left.dtype, None
        if type(right) is not tensor:
            number = right if type(right) in (int, float) else None
            other = None if number is None else number_of(dtype, number, pointers)
            if other is None:
                return otherwise(left, right)
        elif right.dtype is dtype and (dtype.name in TYPES or (of_bits and dtype is tl.int1)):
            other = right.handle.data
        elif pointers and dtype.is_ptr() and right.dtype.name in OFFSETS:
            other = right.handle.data.astype(np.uint64) * np.uint64(bytes_of(dtype.element_ty))
        else:
            return otherwise(left, right)
        one = left.handle
        data = compute(other, one.data) if operation.reversed else compute(one.data, other)
        of = left.type
        if number is None and right.type.is_block():
            if not of.is_block():
                of = right.type if right.dtype is dtype else block_of(dtype, data.shape)
            elif of.shape is not right.type.shape:
                of = block_of(dtype, data.shape)
        if operation.compares:
            of = of.with_element_ty(tl.int1) if of.is_block() else tl.int1
        return tensor(handle_of(data, one.dtype.scalar), of)

    return called


def _indexed_at_once(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`tensor[:, None]` and the like, by NumPy's own rule, which is the same. otherwise: all other operands."""
    tensor, handle_of, whole = tl.tensor, interpreter.TensorHandle, slice(None)

    def called(one: Any, places: Any) -> Any:
        if type(places) is not tuple or not one.type.is_block() or any(at is not None and at != whole for at in places):
            return otherwise(one, places)
        data = one.handle.data[places]
        return tensor(handle_of(data, one.handle.dtype.scalar), block_of(one.dtype, data.shape))

    return called


def _converted_at_once(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`tensor.to(dtype)`. otherwise: with options."""
    cast = interpreter.interpreter_semantic.cast

    def called(one: Any, dtype: Any, **options: Any) -> Any:
        return otherwise(one, dtype, **options) if options or type(dtype) is not tl.dtype else cast(one, dtype)

    return called


def _look_at_each_function_once() -> None:
    """Of a kernel the interpreter reads the signature three times at each launch, and of an argument the name of its
    type, from which it makes the type."""
    signature_of, names_of = functools.cache(inspect.signature), functools.cache(inspect.getfullargspec)

    def arguments(function: Any, *args: Any, **options: Any) -> dict[str, Any]:
        bound = signature_of(function).bind(*args, **options)
        bound.apply_defaults()
        return bound.arguments

    looked_up = {**vars(inspect), "getfullargspec": names_of, "getcallargs": arguments}
    interpreter.inspect = types.SimpleNamespace(**looked_up)
    core, plain = tl.core, {tl.tensor, type(None), bool, int, float, str, tl.dtype}
    unwrap = core._unwrap_if_constexpr  # of each argument of each function of the language
    core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
    make, made = tl.str_to_ty, functools.cache(tl.str_to_ty)
    tl.str_to_ty = lambda name, values: make(name, values) if isinstance(name, tuple) else made(name, values)


def _move_the_bits_of_bfloat16() -> None:
    """They are the upper half of a float32. The interpreter takes both apart and puts them together again; here too the
    lower half is cut off."""
    convert = interpreter._convert_float

    @functools.wraps(convert)
    def moved(data: Any, of: Any, to: Any, rounding: Any) -> Any:
        if of is tl.bfloat16 and to is tl.float32:
            return data.astype(np.uint32) << np.uint32(16)
        if of is tl.float32 and to is tl.bfloat16 and rounding is None:
            return (np.ascontiguousarray(data).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return convert(data, of, to, rounding)

    interpreter._convert_float = moved


def make_interpreter_quick() -> None:
    """In this process, once."""
    needed = ("_patch_lang", "_patch_attr", "_get_np_dtype", "_convert_float", "interpreter_builder", "TensorHandle")
    if hasattr(interpreter, MARK) or not all(hasattr(interpreter, name) for name in needed):
        return
    setattr(interpreter, MARK, True)
    _patch_once()
    _look_for_no_overflow()
    _make_each_shape_once()
    _match_operands_once()
    _make_handles_without_ado()
    _look_types_up()
    _call_with_less_ado()
    _look_at_each_function_once()
    _move_the_bits_of_bfloat16()
    load_at_once()
