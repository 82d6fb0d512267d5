"""Checks a file of `torch.save` before anything reads it.

The file is a zip archive: a pickle program that builds the objects, and the bytes of each tensor. The program is
inspected and never run: functions that it would call appear by name. Only the parts of a dictionary of ordinary tensors
are accepted. The reader (`runahead.runtime.models.drafters.head_files`) is torch's restricted one, which knows few
further functions.

Source of the layout: torch/serialization.py and torch/_weights_only_unpickler.py of PyTorch.
"""

from __future__ import annotations

import io
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import Final

from runahead.runtime.checkpoint.errors import CheckpointError
from runahead.runtime.checkpoint.refusals import AGAIN, making_safetensors, refuse_lfs_pointer

MOST_BYTES: Final = 16 << 30  # of a draft head's file, whatever its configuration
MOST_AROUND: Final = 1 << 20  # bytes beside tensors: of the program and the archive's directory
_TOO_LARGE: Final = f"a part that is no tensor takes over {MOST_AROUND} bytes"
_ZIP: Final = b"PK\x03\x04"
_PROGRAM: Final = "data.pkl"
_PART: Final = re.compile(
    r"[^/]+/(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id)"
)
_MAY_NAME: Final = frozenset(
    {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}
    | {f"torch {kind}Storage" for kind in ("Float", "Half", "BFloat16", "Long", "Int", "Bool")}
)
# Opcodes that call, or name a callable in ways that torch.save does not use.
_OTHER_CALLS: Final = frozenset({"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"})
_TUPLES: Final = frozenset({"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_PUTS: Final = frozenset({"BINPUT", "LONG_BINPUT"})
_GETS: Final = frozenset({"BINGET", "LONG_BINGET"})
# Opcodes of torch.save for texts, numbers, containers and tensors.
_HARMLESS: Final = frozenset(
    {"PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
    | {"BINUNICODE", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"}
    | {"GLOBAL", "BINPERSID", "REDUCE", "BUILD"}
)
# The end records of an archive, the earlier one for large numbers.
_END: Final = struct.Struct("<4s4H2LH")
_LARGE_LOCATOR: Final = struct.Struct("<4sLQL")
_LARGE_END: Final = struct.Struct("<4sQ2H2L4Q")
# Errors of the standard library for inconsistent archives.
_NOT_TRUE: Final = (
    zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, ValueError, KeyError, IndexError, OverflowError,
    NotImplementedError, RuntimeError, struct.error,
)  # fmt: skip


class _Bounded(io.FileIO):
    """A file whose single reads are limited to `MOST_AROUND` bytes, whatever its headers say."""

    def read(self, size: int | None = -1, /) -> bytes:
        here = self.tell()
        left = max(0, self.seek(0, io.SEEK_END) - here)
        self.seek(here)
        asked = left if size is None or size < 0 else min(size, left)
        if asked > MOST_AROUND:
            raise zipfile.BadZipFile(_TOO_LARGE)
        return super().read(asked)


def check_archive(path: Path) -> None:
    """Raise CheckpointError unless this is an uncompressed zip archive of tensors only, of at most `MOST_BYTES`.
    Nothing in it is run, and no tensor is read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(24)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    refuse_lfs_pointer(path, begin)
    if size > MOST_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, and a draft head's file at most {MOST_BYTES}: it is no head")
    if not begin.startswith(_ZIP):
        raise CheckpointError(
            f"{path} is not a zip archive, the format of torch.save since torch 1.6: an older file can't be "
            f"checked before it runs code; {making_safetensors(path)}"
        )
    try:
        with _Bounded(path) as bounded:
            _check_directory(bounded, size)
        with _Bounded(path) as bounded, zipfile.ZipFile(bounded) as archive:
            program = _program_of(path, archive, size)
        _check_program(path, program)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    except CheckpointError:
        raise
    except _NOT_TRUE as error:
        raise CheckpointError(f"{path} is cut off or damaged: {error}; {AGAIN}") from error


def _check_directory(file: _Bounded, size: int) -> None:
    """Raise BadZipFile unless the archive has exactly one directory, directly before its end records. Readers locate it
    in two ways; with two directories the checked content could differ from what torch reads.
    """
    file.seek(max(0, size - _END.size - _LARGE_LOCATOR.size - _LARGE_END.size))
    tail = file.read()
    sign, *_, length, begin, comment = _END.unpack(tail[-_END.size :])
    end, tail = size - _END.size, tail[: -_END.size]
    if sign != b"PK\x05\x06" or comment:
        raise zipfile.BadZipFile("it does not end as an archive does")
    sign, _, record, _ = _LARGE_LOCATOR.unpack(tail[-_LARGE_LOCATOR.size :])
    if sign == b"PK\x06\x07":
        end -= _LARGE_LOCATOR.size + _LARGE_END.size
        sign, *_, length, begin = _LARGE_END.unpack(tail[: -_LARGE_LOCATOR.size])
        if sign != b"PK\x06\x06" or record != end:
            raise zipfile.BadZipFile("its directory's record is not where it is said to be")
    if begin + length != end:
        raise zipfile.BadZipFile("its directory is not where it is said to be")


def _program_of(path: Path, archive: zipfile.ZipFile, size: int) -> bytes:
    parts = archive.infolist()
    for part in parts:
        if not _PART.fullmatch(part.filename) or part.filename != part.orig_filename:
            raise CheckpointError(f"{path} has a part {part.orig_filename!r}, which no file of tensors has")
        if part.compress_type != zipfile.ZIP_STORED or part.file_size != part.compress_size or part.flag_bits & 1:
            raise CheckpointError(f"{path} has a part {part.filename!r} that is packed, and torch.save packs none")
    if sum(part.file_size for part in parts) > size:
        raise CheckpointError(f"{path} says of its parts that they are larger than itself; {AGAIN}")
    programs = [part for part in parts if part.filename.rpartition("/")[2] == _PROGRAM]
    if len(programs) != 1 or len({part.filename for part in parts}) < len(parts):
        raise CheckpointError(f"{path} has {len(programs)} parts {_PROGRAM}, or a part twice; {AGAIN}")
    if programs[0].file_size > MOST_AROUND:
        raise zipfile.BadZipFile(_TOO_LARGE)
    return archive.read(programs[0])


def _check_program(path: Path, program: bytes) -> None:
    tuples: set[object] = set()  # memoized tuples
    before = ""
    for instruction, named, _ in pickletools.genops(program):
        if instruction.name in _OTHER_CALLS or (instruction.name == "GLOBAL" and named not in _MAY_NAME):
            what = str(named).replace(" ", ".") if instruction.name == "GLOBAL" else f"something by {instruction.name}"
            raise CheckpointError(
                f"{path} would call {what}, which no file of tensors does: nothing of it was run; it is no draft head, "
                "and may be meant to do harm"
            )
        name = instruction.name
        if name in _PUTS and before in _TUPLES:
            tuples.add(named)
        # Nested tuples that repeat each other: a short program could build an exponential structure.
        if (name in _GETS and named in tuples) or name not in _HARMLESS | _TUPLES | _PUTS | _GETS:
            raise CheckpointError(f"{path} has a program that torch.save does not write ({name}); it is no draft head")
        before = before if name in _PUTS else name
