"""The folder of compiled kernels between starts.

Triton keeps an entry for each kernel, named by its source, parameters, Triton's version and the architecture, and one
for the C module that launches kernels. It writes files elsewhere first, so concurrent starts are safe. This module
adds: a damaged file, after a crash or on a full disk, counts as missing, where Triton's reader would fail the start;
lookups write nothing and work wherever the folder is mounted; errors are sentences.
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

_MODULE: Final = ".so"  # suffix of a C module
_SEAL: Final = ".sha256"
_FILL: Final = "`runahead kernels` with the flags of the start fills it where that can be done"


class KernelCacheError(OSError):
    """A kernel is not in the cache and can't be compiled here. The sentence says what is missing."""


def use_kernel_cache(folder: str, called: str) -> None:
    """Use this folder for compiled kernels, and make it if needed. Call before any kernel runs.

    folder: empty for Triton's, TRITON_CACHE_DIR or ~/.triton/cache. called: the setting's name in messages. Raises
    KernelCacheError if the folder can't be made.
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
    """One entry: a kernel's group of files, or a C module's file. Triton calls the methods."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        if override or dump:  # folders for debugging kernels
            super().__init__(key, override=override, dump=dump)
            return
        self.key = key
        self.cache_dir = str(Path(triton.knobs.cache.dir) / key)
        self.lock_path = str(Path(self.cache_dir) / "lock")

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file. Raises KernelCacheError if that fails."""
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
        """Write a group. group: paths of the entry's files, by name."""
        seals = {name: _digest(Path(path)) for name, path in group.items()}
        return self.put(json.dumps({"child_paths": group, "seals": seals}), f"__grp__{filename}", binary=False)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the group, None if a file is missing or damaged."""
        try:
            seals = json.loads(Path(self._make_path(f"__grp__{filename}")).read_bytes())["seals"]
            paths = {name: self._make_path(name) for name in seals}
            whole = all(_digest(Path(paths[name])) == seal for name, seal in seals.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return paths if whole else None

    def get_file(self, filename: str) -> str | None:
        """Return the file. Raises KernelCacheError for a missing C module that can't be compiled."""
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
    """Say what this machine lacks to compile a C module, empty if nothing."""
    if triton.knobs.build.cc is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "a C compiler (gcc, clang, or what CC names)"
    # Triton uses the second on systems with their own scheme
    schemes = {sysconfig.get_default_scheme(), "posix_prefix"}
    headers = [Path(sysconfig.get_path("include", scheme)) / "Python.h" for scheme in sorted(schemes)]
    return "" if any(header.exists() for header in headers) else f"Python's header files ({headers[-1]})"
