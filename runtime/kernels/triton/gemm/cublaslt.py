"""Matrix products by cuBLASLt, called directly: without split-K, and with one kernel pinned for each shape.

Without split-K each output is one float32 accumulator that adds up the depth in ascending steps of 16, whatever kernel
of the library computes it and however many rows there are. That was seen on one H200, in bfloat16, for every kernel
that the library proposes. Each one is compared with our kernels while the service warms up, and none is taken that
differs, so that the pinned kernel changes no bit and may be the fastest one. The library's own choice takes up to twice
as long at some numbers of rows; torch would add split-K, and its settings are the whole process's.

Source: the cuBLAS manual, *Using the cuBLASLt API*.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch

from runahead.runtime.kernels.layers import Linear
from runahead.runtime.kernels.quantized_weight import Fp8Weight
from runahead.runtime.kernels.triton.gemm.cublaslt_choice import Chain, choose_kernel
from runahead.runtime.kernels.triton.gemm.fp8_rows import Fp8Rows
from runahead.runtime.kernels.triton.gpu.capability import current_gpu

_CANDIDATES: Final = 8  # kernels that the library proposes for a shape, at most
_SPLIT_BYTES: Final = 32 << 20  # of workspace, where products may be split
_FP8: Final = torch.float8_e4m3fn
_COMPUTE_32F: Final = 68
_HALVES: Final = (torch.bfloat16, torch.float16)
_TYPES: Final = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, _FP8: 28}  # cudaDataType
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER, _BIAS_TYPE = 3, 7, 8, 26  # attributes of a product
_TRANSPOSED, _WITH_BIAS = 1, 4
_SCALES_OF_A, _SCALES_OF_B, _MODE_OF_A, _MODE_OF_B = 17, 18, 31, 32
_ROWS_OF_128, _BLOCKS_OF_128 = 4, 5  # a float32 scale for each row and 128 columns, and for 128 rows and 128 columns
_ROWS_BY_OUTPUT: Final = 128  # up to which kernels with a scale for each output were faster than those with blocks
# Of a preference: no workspace and no reduction scheme mean no split-K.
_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_MOST_ALIGNED: Final = 256  # bytes that a kernel may ask for


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class ProductShape:
    """out = x @ weight.T: rows of x, outputs and depth of the weights, the dtypes of both and of the result, and the
    bytes to which weights, x and out are aligned. Of FP8, both have scales; the weights' are for blocks or
    channels."""

    rows: int
    outputs: int
    depth: int
    dtype: torch.dtype
    out: torch.dtype
    aligned: tuple[int, int, int]
    has_bias: bool = False
    has_channels: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that the library proposes for a product. in_blocks: of FP8, it reads the weights' scales of blocks, and
    not one for each output."""

    product: ctypes.c_void_p
    in_blocks: bool
    found: Any  # _Found


@dataclass(slots=True)
class Pinned:
    """A shape's product as the library knows it. choice: which of the candidates computes it. timed: that was chosen by
    their times. exact: algorithms found to have the bits of one float32 accumulator."""

    layouts: tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    candidates: tuple[Candidate, ...]
    choice: int = 0
    timed: bool = False
    exact: tuple[int, ...] = ()


class VendorError(RuntimeError):
    """cuBLASLt has refused a call: its name and the status."""


class VendorLibrary:
    """cuBLASLt on the current GPU. One thread uses it at a time."""

    def __init__(self, path: str, *, split_k: bool = False) -> None:
        """Load the library. path: of its file. split_k: allow products split along their depth, for comparison. Raises
        OSError and VendorError."""
        self._workspace = torch.empty(_SPLIT_BYTES if split_k else 0, dtype=torch.uint8, device="cuda")
        self._library = ctypes.CDLL(path)
        self._matmul = self._library.cublasLtMatmul
        pointer, algorithm = ctypes.c_void_p, ctypes.POINTER(_Found)
        self._matmul.argtypes = [*(pointer,) * 12, algorithm, pointer, ctypes.c_size_t, pointer]
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._factors = ctypes.addressof(self._one), ctypes.addressof(self._zero)
        self.pinned: dict[ProductShape, Pinned | None] = {}  # None: the library has no kernel
        self._times = False

    def product(self, x: torch.Tensor | Fp8Rows, linear: Linear, out: torch.Tensor, chain: Chain | None = None) -> bool:
        """out = x @ weight.T + bias, enqueued on the current stream; the bias is added to the float32 sums.

        x: contiguous [T, in]. linear: contiguous weight [out, in], of x's dtype; an FP8 matrix where x is Fp8Rows. out:
        contiguous [T, out], of x's dtype or float32, bfloat16 of FP8; of float32 without a bias. chain: computes the
        same in the exact kernels' order; then the library does only where its kernel was found to have the same bits,
        while the service warmed up. Returns whether the library does: it has no kernel for odd depths. Raises
        VendorError.
        """
        numbers, weight = _operands(x, linear)
        bias = linear.bias
        assert numbers.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
        shape = ProductShape(
            numbers.shape[0], weight.shape[0], weight.shape[1], numbers.dtype, out.dtype,
            (_aligned(weight), _aligned(numbers), _aligned(out)), bias is not None,
            isinstance(linear.quantized, Fp8Weight) and linear.quantized.channels is not None,
        )  # fmt: skip
        if shape not in self.pinned:
            self.pinned[shape] = self._described(shape, x, linear)
        pinned = self.pinned[shape]
        if pinned is None:
            return False
        if self._times and not pinned.timed and not torch.cuda.is_current_stream_capturing():
            candidates = range(len(pinned.candidates))
            pinned.choice, pinned.exact = choose_kernel(partial(self.run, pinned), candidates, linear, out, chain)
            pinned.timed = True
        if chain is not None and pinned.choice not in pinned.exact:
            return False
        self.run(pinned, pinned.choice, x, linear, out)
        return True

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Inside, a product of a shape that is met for the first time waits for the GPU while the kernels that the
        library proposes are timed. Elsewhere such a shape takes the library's first proposal."""
        before, self._times = self._times, True
        try:
            yield
        finally:
            self._times = before

    def run(self, pinned: Pinned, choice: int, x: torch.Tensor | Fp8Rows, linear: Linear, out: torch.Tensor) -> None:
        """`product` of a shape that is pinned, by one of its kernels."""
        numbers, weight = _operands(x, linear)
        candidate = pinned.candidates[choice]
        product = candidate.product
        if linear.bias is not None:
            self._set("MatmulDesc", product, _BIAS_POINTER, ctypes.c_void_p(linear.bias.data_ptr()))
        self._set_scales(product, x, linear, candidate.in_blocks)
        of_weight, of_x, of_out = pinned.layouts
        one, zero = self._factors
        to, stream = out.data_ptr(), torch.cuda.current_stream().cuda_stream
        # A row of the library's matrices is a column of ours: it computes out.T = weight @ x.T.
        status = self._matmul(
            self._handle, product, one, weight.data_ptr(), of_weight, numbers.data_ptr(), of_x, zero, to, of_out,
            to, of_out, ctypes.byref(candidate.found), self._workspace.data_ptr(), self._workspace.numel(), stream,
        )  # fmt: skip
        if status:
            raise VendorError(
                f"cublasLtMatmul of {numbers.shape[0]} rows by {tuple(weight.shape)} failed with {status}"
            )

    def _set_scales(self, product: ctypes.c_void_p, x: torch.Tensor | Fp8Rows, linear: Linear, in_blocks: bool) -> None:
        """Set the addresses and layout of an FP8 product's scales."""
        if isinstance(x, Fp8Rows) and isinstance(linear.quantized, Fp8Weight):
            of_weights = linear.quantized.blocks if in_blocks else linear.quantized.by_output
            self._set("MatmulDesc", product, _SCALES_OF_A, ctypes.c_void_p(of_weights.data_ptr()))
            self._set("MatmulDesc", product, _SCALES_OF_B, ctypes.c_void_p(x.scales.data_ptr()))

    def _described(self, shape: ProductShape, x: torch.Tensor | Fp8Rows, linear: Linear) -> Pinned | None:
        layouts = (
            self._layout(shape.dtype, shape.depth, shape.outputs),
            self._layout(shape.dtype, shape.depth, shape.rows),
            self._layout(shape.out, shape.outputs, shape.rows),
        )
        forms = (False,) if shape.dtype != _FP8 else (False, True) if shape.rows <= _ROWS_BY_OUTPUT else (True, False)
        candidates: list[Candidate] = []
        for in_blocks in forms:
            try:
                product = self._product(shape, x, linear, in_blocks)
            except VendorError:
                if shape.dtype != _FP8:
                    raise
                return None  # the library of CUDA 12.8 and before has no such scales
            found = self._proposed(shape, product, layouts, _CANDIDATES // len(forms))
            candidates += [Candidate(product, in_blocks, one) for one in found]
        return Pinned(layouts, tuple(candidates)) if candidates else None

    def _product(
        self, shape: ProductShape, x: torch.Tensor | Fp8Rows, linear: Linear, in_blocks: bool
    ) -> ctypes.c_void_p:
        """Describe a product to the library. in_blocks: as `Candidate` has it."""
        product = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(product), _COMPUTE_32F, _TYPES[torch.float32])
        self._set("MatmulDesc", product, _TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED))
        if shape.has_bias:
            self._set("MatmulDesc", product, _EPILOGUE, ctypes.c_int32(_WITH_BIAS))
            self._set("MatmulDesc", product, _BIAS_TYPE, ctypes.c_int32(_TYPES[shape.dtype]))
        if shape.dtype == _FP8:
            mode = _BLOCKS_OF_128 if in_blocks else _ROWS_OF_128
            self._set("MatmulDesc", product, _MODE_OF_A, ctypes.c_int32(mode))
            self._set("MatmulDesc", product, _MODE_OF_B, ctypes.c_int32(_ROWS_OF_128))
            self._set_scales(product, x, linear, in_blocks)
        return product

    def _proposed(self, shape: ProductShape, product: ctypes.c_void_p, layouts: Sequence[Any], most: int) -> list[Any]:
        """The kernels that the library proposes, the one that it would choose first."""
        preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        self._set("MatmulPreference", preference, _WORKSPACE, ctypes.c_uint64(self._workspace.numel()))
        if not self._workspace.numel():
            self._set("MatmulPreference", preference, _REDUCTIONS, ctypes.c_uint32(0))
        for attribute, aligned in zip(_ALIGNMENTS, (*shape.aligned, shape.aligned[-1]), strict=True):
            self._set("MatmulPreference", preference, attribute, ctypes.c_uint32(aligned))
        found, count = (_Found * most)(), ctypes.c_int()
        self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, product, *layouts, layouts[-1], preference, most, found, ctypes.byref(count)
        )
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        return [one for one in found[: count.value] if one.state == 0]

    def _layout(self, dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
        """Make the layout of a column-major matrix."""
        layout = ctypes.c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", ctypes.byref(layout), _TYPES[dtype], ctypes.c_uint64(rows),
            ctypes.c_uint64(columns), ctypes.c_int64(rows),
        )  # fmt: skip
        return layout

    def _set(self, kind: str, of: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._call(
            f"cublasLt{kind}SetAttribute", of, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
        )

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise VendorError(f"{name} failed with {status}")


def _operands(x: torch.Tensor | Fp8Rows, linear: Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the rows and of the weights."""
    if isinstance(x, torch.Tensor):
        return x, linear.weight
    assert isinstance(linear.quantized, Fp8Weight)
    return x.numbers, linear.quantized.numbers


def _aligned(tensor: torch.Tensor) -> int:
    """Bytes to which its first element is aligned, as far as it matters."""
    address = tensor.data_ptr()
    return min(address & -address or _MOST_ALIGNED, _MOST_ALIGNED)


@cache
def vendor_library() -> VendorLibrary | None:
    """cuBLASLt of the current GPU, as torch has loaded it; None without a GPU."""
    path = None if current_gpu() is None else library_path()
    return None if path is None else VendorLibrary(path)


def library_path() -> str | None:
    """Return the path of the cuBLASLt that torch has loaded for the current GPU; None if it has loaded none."""
    torch.zeros((), device="cuda")  # makes the process's context, which torch warns of where it is missing
    torch.cuda.current_blas_handle()  # loads the library
    mapped = (line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    return next((path for path in mapped if "libcublasLt.so" in path), None)


def exact_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, chain: Chain) -> None:
    """out = x @ weight.T, each value the sum of one float32 accumulator over the depth, rounded once.

    x: [T, in]. weight: [out, in]. out: contiguous [T, out], of x's dtype or float32. chain: computes the same; it does
    in float32, and where the vendor's library was not found to, which is found out while the service warms up.
    """
    # The comparison at start mirrors weights, whose depth must be even for that.
    may_be = x.dtype in _HALVES and weight.shape[1] % 2 == 0
    library, linear = vendor_library() if may_be else None, Linear(weight, None)
    if library is None or not library.product(x.contiguous(), linear, out, chain):
        chain(x, linear, out)


@contextmanager
def choosing_products() -> Iterator[None]:
    """Choose kernels for new products while warming up: see `VendorLibrary.choosing`."""
    library = vendor_library()
    with nullcontext() if library is None else library.choosing():
        yield
