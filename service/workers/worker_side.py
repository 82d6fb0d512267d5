"""A worker's side: it reads its orders, then questions, from standard input and answers each with one line.

A worker that runs untrusted code is confined before: no files, sockets or other processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import resource
import struct
import sys
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from runahead.runtime.process_end import signal_at_parents_death

_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_SECCOMP: Final = 22
_SECCOMP_MODE_FILTER: Final = 2
_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000 | 1  # with EPERM
# Filter instructions, see seccomp(2): load a word, compare with a constant, return.
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4  # offsets in a filter's input

# By machine: its architecture in a filter, and the allowed system calls, for reading and writing pipes, allocating
# memory and measuring time: read, write, lseek, mmap, mprotect, munmap, brk, rt_sigaction, rt_sigprocmask,
# rt_sigreturn, mremap, madvise, getpid, exit, getrlimit, getrusage, gettid, futex, clock_gettime, exit_group,
# getrandom, setitimer, restart_syscall, sigaltstack, fstat, sched_yield, membarrier, rseq.
_CALLS: Final = {
    "x86_64": (
        0xC000003E,
        (0, 1, 8, 9, 10, 11, 12, 13, 14, 15, 25, 28, 39, 60, 97, 98, 186, 202, 228, 231, 318, 38, 219, 131, 5, 24,
         324, 334),
    ),
    "aarch64": (
        0xC00000B7,
        (63, 64, 62, 222, 226, 215, 214, 134, 135, 139, 216, 233, 172, 93, 163, 165, 178, 98, 113, 94, 278, 103,
         128, 132, 80, 124, 283, 293),
    ),
}  # fmt: skip

_STATM: Final = Path("/proc/self/statm")
_DATA: Final = 5  # its field of what `RLIMIT_DATA` bounds, in pages

T = TypeVar("T")


def confine(memory_bytes: int) -> str:
    """Forbid this process to open files or sockets, start processes, or use more address space than this. Open
    descriptors stay open; load modules before.

    Returns restrictions that could not be applied as a sentence, empty if all were. Resource limits apply on every
    system that has them, the system call filter on Linux only.
    """
    for name, most in (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_NOFILE", 3),  # the standard streams
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_AS", memory_bytes),
    ):
        with contextlib.suppress(ValueError, OSError, AttributeError):  # macOS has no limit of the address space
            resource.setrlimit(getattr(resource, name), (most, most))
    calls = _CALLS.get(platform.machine())
    if sys.platform != "linux" or calls is None:
        return f"there is no filter of system calls for {sys.platform} on {platform.machine()}"
    return _filter_calls(*calls)


def _filter_calls(architecture: int, allowed: tuple[int, ...]) -> str:
    """Let all but these system calls fail with EPERM. Returns the reason if that is not possible, else an empty
    text.
    """
    code = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_EQUAL, architecture, if_not=len(allowed) + 1),
        _instruction(_LOAD, _NUMBER_AT),
        *(_instruction(_EQUAL, number, if_so=len(allowed) - index) for index, number in enumerate(allowed)),
        _instruction(_RETURN, _REFUSE),
        _instruction(_RETURN, _ALLOW),
    ]
    instructions = ctypes.create_string_buffer(b"".join(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(instructions)))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or library.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0
    ):
        return f"the system takes no filter of system calls (error {ctypes.get_errno()})"
    return ""


def _instruction(code: int, constant: int, *, if_so: int = 0, if_not: int = 0) -> bytes:
    """Encode an instruction. if_so, if_not: instructions to skip after a comparison."""
    return struct.pack("=HBBI", code, if_so, if_not, constant)


class Ready(msgspec.Struct, frozen=True):
    """The answer to a worker's orders. unusable: why it can never answer, empty if it can. warning: missing
    confinement, empty if complete.
    """

    unusable: str = ""
    warning: str = ""


def read_orders(kind: type[T]) -> T:
    """Return the first line. From here on this process ends with its parent."""
    signal_at_parents_death()
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)


def say(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def data_bytes() -> int:
    """Return the bytes that `RLIMIT_DATA` limits; 0 if the system reports and limits none."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[_DATA]) * resource.getpagesize()
    except OSError:
        return 0
