"""Runs a Gluon kernel on the CPU, for which Triton has no interpreter: the kernel's own Python, with emulated words.

Each group of warps is a thread. The bulk copy engine is one more, which takes what it was asked in random order and
counts bytes on a barrier when they lie there; a product on the matrix units reads shared memory as late as it may, when
it is waited for. So what is read too early or overwritten too soon gives other numbers, and who waits for what never
comes is told. Layouts are not emulated, but for the order in which swizzled tiles lie in shared memory.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final

import torch

_LINE_BYTES: Final = 128  # of swizzled shared memory
_DEADLOCK_S: Final = 20.0
_own = threading.local()  # a thread's program and its products that nobody has waited for


class StuckError(AssertionError):
    """A group of warps waits for what nobody will do."""


class Pointer:
    """Into a tensor, at one place or many."""

    def __init__(self, flat: torch.Tensor, at: Any = 0) -> None:
        self._flat, self._at = flat, torch.as_tensor(at)
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self._flat, self._at + more)

    def load(self, mask: Any, other: Any) -> torch.Tensor:
        if mask is None:
            return self._flat[self._at]
        mask = torch.as_tensor(mask).expand(self._at.shape)
        return torch.where(
            mask, self._flat[torch.where(mask, self._at, 0)], torch.as_tensor(other, dtype=self._flat.dtype)
        )

    def store(self, value: torch.Tensor, mask: torch.Tensor) -> None:
        mask = mask.expand(self._at.shape)
        self._flat[self._at[mask]] = value.expand(self._at.shape)[mask].to(self._flat.dtype)


class Shared:
    """Shared memory, [n, lines, width] or [lines, width]: lines of the first 128 bytes of each, then of the next."""

    def __init__(self, memory: torch.Tensor, shape: Sequence[int]) -> None:
        self._memory, self.shape, self.dtype = memory, tuple(shape), memory.dtype

    def index(self, place: Any) -> Shared:
        size = self._memory.numel() // self.shape[0]
        place = int(place)
        assert 0 <= place < self.shape[0], f"place {place} of {self.shape[0]}"
        return Shared(self._memory[place * size : (place + 1) * size], self.shape[1:])

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
        assert dtype == self.dtype and torch.Size(shape).numel() == self._memory.numel()
        return Shared(self._memory, shape)

    def permute(self, order: tuple[int, int]) -> Callable[[], torch.Tensor]:
        assert order == (1, 0)
        return lambda: self.load(None).T

    def load(self, layout: object) -> torch.Tensor:
        (lines, width), half = self.shape, _LINE_BYTES // self.dtype.itemsize
        return self._memory.view(width // half, lines, half).permute(1, 0, 2).reshape(lines, width).clone()

    def store(self, value: torch.Tensor) -> None:
        (lines, width), half = self.shape, _LINE_BYTES // self.dtype.itemsize
        assert value.shape == self.shape and value.dtype == self.dtype
        self._memory.copy_(value.view(lines, width // half, half).permute(1, 0, 2).reshape(-1))


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were announced lie there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = self._left = self._bytes = self._phase = 0

    def begin(self, count: int) -> None:
        self._count = self._left = count

    def add(self, arrivals: int, announced: int) -> None:
        with self._changed:
            self._left -= arrivals
            self._bytes += announced
            assert self._left >= 0, "more arrivals than the barrier was made for"
            if self._left == 0 and self._bytes == 0:
                self._phase, self._left = self._phase ^ 1, self._count
                self._changed.notify_all()

    def wait(self, phase: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._phase != phase, _DEADLOCK_S):
                raise StuckError(f"{threading.current_thread().name} waits for phase {phase} of a barrier")


class Engine:
    """Copies what it was asked for, in random order, until it is closed."""

    def __init__(self, seed: int) -> None:
        self._random, self._asked = random.Random(seed), list[Callable[[], None]]()
        self._changed, self._closed, self._busy = threading.Condition(), False, False
        self._thread = threading.Thread(target=self._run, name="copy engine")
        self._thread.start()

    def ask(self, copy: Callable[[], None]) -> None:
        with self._changed:
            self._asked.append(copy)
            self._changed.notify()

    def finish(self) -> None:
        """Wait for the end of everything that was asked for."""
        with self._changed:
            self._changed.wait_for(lambda: not self._asked and not self._busy)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._closed)
                if not self._asked:
                    return
                copy, self._busy = self._asked.pop(self._random.randrange(len(self._asked))), True
            copy()
            with self._changed:
                self._busy = False
                self._changed.notify_all()


@dataclass
class _Product:
    a: Any
    b: Any
    acc: torch.Tensor | _Product | None
    made: torch.Tensor | None = None

    def make(self) -> None:
        a = self.a.load(None) if isinstance(self.a, Shared) else self.a
        b = self.b.load(None) if isinstance(self.b, Shared) else self.b()
        made = a.float() @ b.float()
        acc = self.acc.made if isinstance(self.acc, _Product) else self.acc
        self.made = made if acc is None else acc + made


def _multiply(a: Any, b: Any, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> _Product:
    assert is_async
    product = _Product(a, b, acc if use_acc else None)
    _own.products.append(product)
    return product


def _waited(outstanding: int, deps: Sequence[Any]) -> Any:
    while len(_own.products) > outstanding:
        _own.products.pop(0).make()
    # A product that nobody has waited for stays one, which no arithmetic takes.
    found = [one if not isinstance(one, _Product) or one.made is None else one.made for one in deps]
    return found[0] if len(found) == 1 else tuple(found)


class _Words:
    """What the kernel calls `gl`, in a program of a grid."""

    int32, int64, float32, float64 = torch.int32, torch.int64, torch.float32, torch.float64
    bfloat16, float8e4nv = torch.bfloat16, torch.float8_e4m3fn
    constexpr = staticmethod(lambda value: value)
    static_range = range
    arange = staticmethod(lambda begin, end, layout: torch.arange(begin, end))
    convert_layout = staticmethod(lambda value, layout: value)
    expand_dims = torch.unsqueeze
    fma = staticmethod(lambda a, b, c: (a.double() * b.double() + c.double()).float())
    exp2, exp, rsqrt, zeros_like = torch.exp2, torch.exp, torch.rsqrt, torch.zeros_like
    permute, reshape = torch.permute, torch.reshape
    split = staticmethod(lambda value: value.unbind(-1))
    where = staticmethod(
        lambda condition, one, other: torch.where(
            torch.as_tensor(condition), torch.as_tensor(one), torch.as_tensor(other)
        )
    )
    maximum = staticmethod(lambda one, other: torch.maximum(torch.as_tensor(one), torch.as_tensor(other)))
    minimum = staticmethod(lambda one, other: torch.minimum(torch.as_tensor(one), torch.as_tensor(other)))
    max = staticmethod(lambda value, axis: value.amax(axis))
    sum = staticmethod(lambda value, axis: value.sum(axis))
    full = staticmethod(lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype))
    zeros = staticmethod(lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype))
    load = staticmethod(lambda pointer, mask=None, other=0: pointer.load(mask, other))
    store = staticmethod(lambda pointer, value, mask: pointer.store(value, mask))
    SliceLayout = BlockedLayout = DotOperandLayout = NVMMADistributedLayout = NVMMASharedLayout = staticmethod(
        lambda *args: None
    )

    def __init__(self, program: int, programs: int) -> None:
        self.program_id = lambda axis: torch.tensor(program)
        self.num_programs = lambda axis: torch.tensor(programs)

    @staticmethod
    def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Any:
        if dtype is torch.int64:
            barriers = [Barrier() for _ in range(shape[0])]
            return SimpleNamespace(index=lambda place: barriers[int(place)])
        return Shared(torch.full((torch.Size(shape).numel(),), float("nan"), dtype=dtype), shape)

    @staticmethod
    def warp_specialize(
        work: Sequence[tuple[Callable[..., Any], Sequence[Any]]], warps: object, registers: object
    ) -> None:
        failures: list[BaseException] = []

        def run(function: Callable[..., Any], arguments: Sequence[Any]) -> None:
            _own.products = []
            try:
                function(*arguments)
                assert not _own.products, "a product that nobody has waited for"
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=one, name=f"group {number}") for number, one in enumerate(work)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def run(
    modules: Sequence[ModuleType],
    kernel: Any,
    grid: int,
    arguments: Sequence[Any],
    options: dict[str, Any],
    seed: int = 1,
    waited: Callable[[bool], None] = lambda dependent: None,
) -> None:
    """Runs a kernel, as Gluon has it, all of whose functions are in these modules.

    arguments: tensors on the CPU, descriptors that have `base`, `shape` and `block_shape`, numbers. waited:
    called where a group of warps waits for the kernels before, when the copies that were asked for have ended. Raises
    StuckError, and what is asserted.
    """
    passed = [_as_passed(one) for one in arguments]
    for program in range(grid):
        engine = Engine(seed + program)

        def wait(dependent: bool, engine: Engine = engine) -> None:
            engine.finish()
            waited(dependent)

        words = _emulated(modules, _Words(program, grid), engine)
        words |= {"wait_for_predecessors": wait, "let_dependents_start": lambda dependent: None}
        try:
            _in_words(kernel.fn, words)(*passed, **options)
        finally:
            engine.close()


def _as_passed(argument: Any) -> Any:
    """What the kernel gets of an argument."""
    if isinstance(argument, torch.Tensor):
        return Pointer(argument.view(-1))
    if hasattr(argument, "block_shape"):
        return SimpleNamespace(**vars(argument), dtype=argument.base.dtype)
    return argument


def _emulated(modules: Sequence[ModuleType], gl: _Words, engine: Engine) -> dict[str, Any]:
    """The modules' functions, with emulated words."""

    def copy(descriptor: Any, place: Sequence[Any], ready: Barrier, to: Shared) -> None:
        lines, width = descriptor.block_shape
        first, column = (int(one) for one in place)
        matrix = descriptor.base.view(descriptor.shape)

        def later() -> None:
            tile = torch.zeros((lines, width), dtype=matrix.dtype)
            there = matrix[first : first + lines, column : column + width]  # lines that no tensor has are zeros
            tile[: there.shape[0], : there.shape[1]] = there
            to.store(tile)
            ready.add(0, -lines * width * matrix.element_size())

        engine.ask(later)

    def leave(descriptor: Any, place: Sequence[Any], shared: Shared) -> None:
        lines, width = descriptor.block_shape
        first, column = (int(one) for one in place)
        to = descriptor.base.view(descriptor.shape)[first : first + lines, column : column + width]

        def later() -> None:
            to.copy_(shared.load(None)[: to.shape[0], : to.shape[1]])
            stored.set()

        _own.stores = [*getattr(_own, "stores", []), stored := threading.Event()]
        engine.ask(later)

    def stores_wait(outstanding: int) -> None:
        while len(stores := getattr(_own, "stores", [])) > outstanding:
            stores.pop(0).wait()

    words: dict[str, Any] = {name: one for module in modules for name, one in vars(module).items()}
    for name, one in list(words.items()):
        function = getattr(one, "fn", None)
        if isinstance(function, FunctionType):
            words[name] = _in_words(function, words)
        elif type(one).__name__ == "constexpr":
            words[name] = one.value
    words |= {
        "gl": gl,
        "tl": gl,
        "warpgroup_mma": _multiply,
        "warpgroup_mma_wait": _waited,
        "fence_async_shared": lambda: None,
        "tma": SimpleNamespace(
            async_copy_global_to_shared=copy, async_copy_shared_to_global=leave, store_wait=stores_wait
        ),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.begin(count),
            wait=lambda barrier, phase: barrier.wait(int(phase)),
            arrive=lambda barrier, count, pred=True: barrier.add(count, 0) if pred else None,
            expect=lambda barrier, announced: barrier.add(1, announced),
        ),
    }
    return words


def _in_words(function: FunctionType, words: dict[str, Any]) -> Callable[..., Any]:
    """The same function, in which names mean what they mean there."""
    return FunctionType(function.__code__, words, function.__name__, function.__defaults__, function.__closure__)
