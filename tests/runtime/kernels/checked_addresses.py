"""In Triton's interpreter an address that lies in none of a kernel's tensors is an error. By itself the interpreter
reads and writes wherever it is told to: a kernel that goes wrong takes the process with it, or what belongs to another
tensor.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray
from triton.runtime import interpreter

from tests.runtime.kernels.quick_functions import bytes_of

MARK = "runahead_checks_addresses"
Found = NDArray[np.uint64]


class AddressError(RuntimeError):
    """A kernel has named memory that none of its tensors has."""


class _Places(threading.local):
    """Of the kernel that this thread interprets. ranges: first byte and the one after the last of each tensor's
    storage, and what the argument is called."""

    kernel: str = ""
    ranges: tuple[tuple[int, int, str], ...] = ()


_places = _Places()


def _ranges_of(name: str, argument: Any) -> list[tuple[int, int, str]]:
    if isinstance(argument, tuple):
        return [one for inner in argument for one in _ranges_of(name, inner)]
    if not hasattr(argument, "data_ptr"):
        return []
    storage = interpreter._unwrap_tensor(argument).untyped_storage()
    return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name)]


def _check(pointers: Any, mask: NDArray[Any] | None, what: str) -> None:
    """Raises AddressError where one of the pointers that the mask lets pass leads nowhere."""
    size = bytes_of(pointers.get_element_ty())
    addresses: Found = pointers.data
    if _lie_in_one(addresses, size):  # those that the mask holds back, too
        return
    if mask is not None:
        addresses = addresses[np.broadcast_to(mask.astype(bool), addresses.shape)]
    if not addresses.size or _lie_in_one(addresses, size):
        return
    for address in np.unique(addresses).tolist():  # of several tensors, perhaps
        if not any(first <= address and address + size <= end for first, end, _ in _places.ranges):
            first, _, nearest = min(_places.ranges, key=lambda one: abs(address - one[0]))
            raise AddressError(
                f"{_places.kernel} {what} {size} bytes that no tensor of it has, {address - first} behind the first of "
                f"{nearest}"
            )


def _lie_in_one(addresses: Found, size: int) -> bool:
    if addresses.size <= 64:  # less than NumPy takes to begin
        listed = addresses.ravel().tolist()
        lowest, highest = min(listed), max(listed)
    else:
        lowest, highest = int(addresses.min()), int(addresses.max())
    for first, end, _ in _places.ranges:  # noqa: SIM110 (at each load and store)
        if first <= lowest and highest + size <= end:
            return True
    return False


def check_addresses() -> None:
    """In this process, once, of loads, stores and atomic operations."""
    if hasattr(interpreter, MARK):
        return
    setattr(interpreter, MARK, True)
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    arguments_of = executor._init_args_hst
    load, store = builder.create_masked_load, builder.create_masked_store
    change, exchange = builder.create_atomic_rmw, builder.create_atomic_cas

    def noted(self: Any, arguments: Any, named: Any) -> Any:
        ours, ours_named = arguments_of(self, arguments, named)
        pairs = [*zip(self.arg_names, ours, strict=False), *ours_named.items()]
        _places.kernel = self.fn.__name__
        _places.ranges = tuple(one for name, argument in pairs for one in _ranges_of(name, argument))
        return ours, ours_named

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask.data, "reads")
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask.data, "writes")
        return store(self, pointers, value, mask, *rest)

    def checked_change(self: Any, how: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask.data, "changes")
        return change(self, how, pointers, value, mask, *rest)

    def checked_exchange(self: Any, pointers: Any, *rest: Any) -> Any:
        _check(pointers, None, "exchanges")
        return exchange(self, pointers, *rest)

    executor._init_args_hst = noted
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw, builder.create_atomic_cas = checked_change, checked_exchange
