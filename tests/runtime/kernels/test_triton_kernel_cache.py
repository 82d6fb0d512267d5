"""The kernel cache: what one start has compiled the next one finds, and nothing that lies in it can end a start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.project.repository import ROOT
from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

import triton  # noqa: E402
from triton.runtime.build import compile_module_from_src  # noqa: E402

from runahead.runtime.kernels.triton.gpu.kernel_cache import KernelCacheError, SealedCache, use_kernel_cache  # noqa: E402

SOURCE = """
#include <Python.h>
static struct PyModuleDef about = {PyModuleDef_HEAD_INIT, "stub", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_stub(void) { return PyModule_Create(&about); }
"""


def said(folder: Path, *actions: str) -> list[str]:
    """What a process says that does these one after the other: see `cached_kernel`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, "-m", "tests.runtime.kernels.cached_kernel", str(folder), *actions]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder that one start has filled, and the digest of its kernel."""
    folder = tmp_path_factory.mktemp("kernels") / "made" / "here"
    ((did, digest),) = (line.split() for line in said(folder, "start"))
    assert did == "compiled"
    return folder, digest


def test_the_next_start_finds_what_was_compiled_where_the_folder_has_moved_and_can_not_be_written(
    filled: tuple[Path, str], tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(filled[0], moved)
    shutil.move(filled[0], tmp_path / "aside")
    try:
        assert said(moved, "start", "read-only", "start") == [f"found {filled[1]}"] * 2
    finally:
        shutil.move(tmp_path / "aside", filled[0])


def test_a_kernel_that_is_missing_where_nothing_can_be_written_is_a_sentence(tmp_path: Path) -> None:
    (sentence,) = said(tmp_path, "read-only", "start")
    assert f"can't be kept in the kernel cache {tmp_path} (Read-only file system)" in sentence
    assert "`runahead kernels` with the flags of the start fills it" in sentence


def test_a_truncated_file_of_whatever_kind_is_compiled_again(filled: tuple[Path, str], tmp_path: Path) -> None:
    folder, digest = tmp_path / "kernels", filled[1]
    shutil.copytree(filled[0], folder)
    names = [path.name for path in files(folder)]
    assert {".cubin", ".json", ".ptx", ".ttir"} <= {Path(name).suffix for name in names}
    assert any(name.startswith("__grp__") for name in names)
    cuts = [f"cut:{name}:{left}" for name in names for left in (0, 100)]
    actions = [action for cut in cuts for action in (cut, "start", "start")]
    assert said(folder, *actions) == [f"compiled {digest}", f"found {digest}"] * len(cuts)


def test_starts_at_once_do_each_other_no_harm(filled: tuple[Path, str], tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as two:
        each = list(two.map(said, [tmp_path] * 2, ["start"] * 2))
    assert {line.split()[1] for lines in each for line in lines} == {filled[1]}
    assert said(tmp_path, "start") == [f"found {filled[1]}"]
    assert not list(tmp_path.rglob("tmp.*"))


# ------------------------------------------------------------ C modules, by which Triton launches kernels


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """This process's kernel cache, for the length of a test."""
    before = triton.knobs.cache.copy()
    use_kernel_cache(str(tmp_path), "--kernel-cache")
    yield tmp_path
    triton.knobs.cache.__dict__.clear()
    triton.knobs.cache.__dict__.update(before.__dict__)
    triton.knobs.setenv("TRITON_CACHE_DIR", before.__dict__.get("dir"))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)


def module_file(cache: Path) -> Path:
    (path,) = [path for path in files(cache) if path.suffix == ".so"]
    return path


def test_a_launcher_that_was_compiled_once_needs_no_compiler_any_more(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_module_from_src(SOURCE, "stub")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    assert compile_module_from_src(SOURCE, "stub").__file__ == str(module_file(cache))


@pytest.mark.usefixtures("no_compiler")
def test_without_it_and_without_a_compiler_the_sentence_says_what_is_missing(cache: Path) -> None:
    with pytest.raises(KernelCacheError) as refusal:
        compile_module_from_src(SOURCE, "stub")
    assert f"is not in the kernel cache {cache}" in str(refusal.value)
    assert "this machine lacks a C compiler (gcc, clang, or what CC names)" in str(refusal.value)
    assert "`runahead kernels` with the flags of the start fills it" in str(refusal.value)


def test_without_pythons_headers_the_sentence_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: "/nowhere")
    with pytest.raises(KernelCacheError, match=r"lacks Python's header files \(/nowhere/Python\.h\)"):
        compile_module_from_src(SOURCE, "stub")


def test_a_truncated_launcher_is_never_loaded(cache: Path) -> None:
    compile_module_from_src(SOURCE, "stub")
    path = module_file(cache)
    whole = path.read_bytes()
    path.unlink()  # the file itself is mapped into this process
    path.write_bytes(whole[: len(whole) // 2])
    assert SealedCache(path.parent.name).get_file(path.name) is None
    compile_module_from_src(SOURCE, "stub")
    assert SealedCache(path.parent.name).get_file(path.name) == str(path)


def test_a_folder_that_can_not_be_made_is_a_sentence_that_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KernelCacheError) as refusal:
        use_kernel_cache(str(tmp_path / "file" / "kernels"), "RUNAHEAD__KERNEL_CACHE")
    assert f"{tmp_path}/file/kernels can't be made (Not a directory); RUNAHEAD__KERNEL_CACHE may name" in str(
        refusal.value
    )
