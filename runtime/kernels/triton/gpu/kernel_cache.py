"""Where compiled kernels are kept from one start to the next.

Triton keeps an entry for each kernel, under a name that is made of the kernel's source, its parameters, Triton's
version and the architecture, and one for the C module by which it launches kernels. It writes each file elsewhere
first, so that two starts at once do no harm. Three things are added here. A file that is not what was written, as a
crash or a full disk may leave it, counts as missing: Triton alone would end the start with what its reader happens to
say. An entry is looked for without writing anything, and found wherever the folder is mounted. And what can't be made
is said in words.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any, Final

import triton
from triton.runtime.cache import FileCacheManager

_MODULE: Final = ".so"  # the end of a C module's name
_SEAL: Final = ".sha256"
_FILL: Final = "`runahead kernels` with the flags of the start fills it where that can be done"


class KernelCacheError(OSError):
    """A kernel is not in the cache and can't be made here. The sentence says what is missing."""


def use_kernel_cache(folder: str, called: str) -> None:
    """From here on kernels are kept there; the folder is made. Before any kernel runs.

    folder: empty for Triton's own, TRITON_CACHE_DIR or ~/.triton/cache. called: what messages call the setting.
    Raises KernelCacheError for a folder that is not there and can't be made.
    """
    if folder:
        triton.knobs.cache.dir = str(Path(folder).expanduser().absolute())
    triton.knobs.cache.manager_class = SealedCache
    path = Path(triton.knobs.cache.dir)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise KernelCacheError(
            f"compiled kernels can't be kept: the folder {path} can't be made ({error.strerror}); {called} may name "
            "another"
        ) from error


class SealedCache(FileCacheManager):  # type: ignore[misc]
    """One entry: a group of files for a kernel, or one file for a C module. Its methods are Triton's to call."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        if override or dump:  # folders of somebody who debugs kernels
            super().__init__(key, override=override, dump=dump)
            return
        self.key = key
        self.cache_dir = str(Path(triton.knobs.cache.dir) / key)
        self.lock_path = str(Path(self.cache_dir) / "lock")

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Raises KernelCacheError where it can't be written."""
        try:
            path = str(super().put(data, filename, binary))
            if filename.endswith(_MODULE):
                super().put(_digest(Path(path)), filename + _SEAL, False)
        except OSError as error:
            raise KernelCacheError(
                f"{filename} had to be compiled, and can't be kept in the kernel cache {triton.knobs.cache.dir} "
                f"({error.strerror}); {_FILL}"
            ) from error
        return path

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """group: paths of the entry's files, by name."""
        seals = {name: _digest(Path(path)) for name, path in group.items()}
        return self.put(json.dumps({"child_paths": group, "seals": seals}), f"__grp__{filename}", binary=False)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """None if one of the files is not there as it was written."""
        try:
            seals = json.loads(Path(self._make_path(f"__grp__{filename}")).read_bytes())["seals"]
            paths = {name: self._make_path(name) for name in seals}
            whole = all(_digest(Path(paths[name])) == seal for name, seal in seals.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return paths if whole else None

    def get_file(self, filename: str) -> str | None:
        """Raises KernelCacheError for a C module that is missing where none can be compiled."""
        path = super().get_file(filename)
        if not filename.endswith(_MODULE):
            return None if path is None else str(path)
        try:
            if path is not None and Path(path + _SEAL).read_bytes() == _digest(Path(path)).encode():
                return str(path)
        except OSError:
            pass
        if lacks := _missing_for_c():
            raise KernelCacheError(
                f"Triton's launcher {filename} is not in the kernel cache {triton.knobs.cache.dir}, and to compile it "
                f"this machine lacks {lacks}; {_FILL}"
            )
        return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _missing_for_c() -> str:
    """What Triton needs to compile a C module and this machine has not; empty if it has all."""
    if triton.knobs.build.cc is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "a C compiler (gcc, clang, or what CC names)"
    schemes = {sysconfig.get_default_scheme(), "posix_prefix"}  # Triton takes the second where a system has its own
    headers = [Path(sysconfig.get_path("include", scheme)) / "Python.h" for scheme in sorted(schemes)]
    return "" if any(header.exists() for header in headers) else f"Python's header files ({headers[-1]})"
