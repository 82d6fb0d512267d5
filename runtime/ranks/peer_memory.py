"""Memory of a GPU that other processes' GPUs write into, and host memory that several processes' GPUs reach.

By the CUDA runtime that torch has loaded: cudaMalloc and cudaIpc, which work in plain containers, and cudaHostRegister.

Source: the CUDA Runtime API manual, *Device Management*, *Memory Management*.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_PORTABLE, _MAPPED = 1, 2


class PeerMemoryError(RuntimeError):
    """A call of the CUDA runtime failed. The sentence names the call and what it says."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class PeerPointer:
    """What Triton takes for a tensor in a peer's memory."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True)
class _Array:
    """Device memory as torch takes it."""

    __cuda_array_interface__: dict[str, Any]


class CudaRuntime:
    """The calls that torch does not offer. Of the current device. Raises PeerMemoryError where torch has loaded no CUDA
    runtime."""

    def __init__(self) -> None:
        torch.cuda.current_stream()  # the runtime is loaded, and the device has its context
        paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
        if not paths:
            raise PeerMemoryError("this process has loaded no CUDA runtime")
        self._library = ctypes.CDLL(min(paths))
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def allocate(self, size: int) -> int:
        """The address of so many bytes on the device."""
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value or 0

    def handle(self, address: int) -> bytes:
        """What another process opens an allocation by. HANDLE_BYTES long."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(memoryview(handle).cast("B"))

    def open(self, handle: bytes) -> int:
        """The address of another process's allocation, for this device. That process must still hold it."""
        pointer = ctypes.c_void_p()
        found = _Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), found, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return pointer.value or 0

    def register(self, memory: memoryview) -> None:
        """Let every device of this process reach a shared mapping, at its own address. It stays registered."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        size, flags = ctypes.c_size_t(memory.nbytes), ctypes.c_uint(_PORTABLE | _MAPPED)
        self._call("cudaHostRegister", ctypes.c_void_p(start), size, flags)

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            raise PeerMemoryError(f"{name} has failed: {self._library.cudaGetErrorString(error).decode()} ({error})")


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor over this process's own device memory, which must outlive it."""
    kind = {torch.int16: "<i2", torch.int32: "<i4", torch.int64: "<i8", torch.float32: "<f4"}[dtype]
    interface = {"shape": shape, "typestr": kind, "data": (address, False), "version": 3}
    return torch.as_tensor(_Array(interface), device=device)


def why_not_together(gpus: Sequence[int]) -> str:
    """Why these GPUs can't be the ranks of one model; empty where they can. gpus: numbers, by rank. Ranks may share
    one."""
    there, needed = torch.cuda.device_count(), max(gpus) + 1
    if there < needed:
        return f"it needs {needed} GPUs, one a rank, and this process sees {there}"
    kinds = {(torch.cuda.get_device_name(each), torch.cuda.get_device_capability(each)) for each in gpus}
    if len(kinds) > 1:
        names = ", ".join(torch.cuda.get_device_name(each) for each in gpus)
        return f"all ranks need the same kind of GPU, and these are {names}: let CUDA_VISIBLE_DEVICES name equal ones"
    for one in gpus:
        for other in gpus:
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return (
                    f"GPU {one} can't reach the memory of GPU {other}: ranks need peer access, by NVLink or "
                    "below one PCIe root without an IOMMU"
                )
    return ""
