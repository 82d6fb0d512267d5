"""The examples of clients/, each made into a command with the toolchain of its language, as docs/clients.md says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import google.rpc

from tests.clients.clean_environment import clean_environment
from tests.project.repository import ROOT

CLIENTS: Final = ROOT / "clients"
DEBIAN: Final = Path(sys.prefix) / "clients/debian"  # where clients/install.sh unpacks Debian's packages
GOOGLEAPIS: Final = Path(next(iter(google.rpc.__path__))).parents[1]  # of googleapis-common-protos: it has google/rpc
GO_GENERATORS: Final = (
    "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.11",
    "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2",
)
BUILD_S: Final = 500.0
RUN_S: Final = 100.0


class MissingToolchainError(Exception):
    """A language's toolchain, or a library that its example needs, is not on this machine."""


@dataclass(frozen=True, slots=True)
class Program:
    """An example that can be run. variables: of its environment, beside those of this process."""

    command: Sequence[str | Path]
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, self.command), *map(str, arguments)],
            cwd=self.folder,
            env=_environment(self.variables),
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )


def python(scratch: Path) -> Program:
    """In an environment that has the package of stubs and what that needs, and nothing else."""
    return Program([clean_environment(scratch), CLIENTS / "python/generate.py"], scratch)


def asyncio(scratch: Path) -> Program:
    return Program([clean_environment(scratch), CLIENTS / "python/generate_asyncio.py"], scratch)


def node(scratch: Path) -> Program:
    folder = CLIENTS / "node"
    _commands("node", "npm")
    if not (folder / "node_modules/.package-lock.json").exists():
        raise MissingToolchainError("clients/node has no node_modules: make clients installs them")
    _built(["npm", "run", "--silent", "build"], folder)
    return Program(["node", "build/generate.js"], folder)


def cpp(scratch: Path) -> Program:
    folder = CLIENTS / "cpp"
    variables = _debian_variables()
    _commands("c++", "make", "pkg-config")
    if _run(["pkg-config", "--exists", "grpc++", "protobuf"], folder, variables).returncode != 0:
        raise MissingToolchainError("pkg-config knows no grpc++: make clients unpacks Debian's libgrpc++-dev")
    _built(["make", "--jobs=2", "CXXFLAGS=-O0", f"GOOGLEAPIS={GOOGLEAPIS}"], folder, variables)
    return Program(["build/generate"], folder, variables)


def java(scratch: Path) -> Program:
    folder = CLIENTS / "java"
    _commands("java", "javac", "make")
    jars = [path for path in (DEBIAN / "usr/share/java", Path("/usr/share/java")) if path.is_dir()]
    if not any((path / "grpc-api.jar").exists() for path in jars):
        raise MissingToolchainError("there is no grpc-api.jar: make clients unpacks Debian's libgrpc-java")
    variables = _debian_variables()
    _built(["make", f"JARS={' '.join(map(str, jars))}", f"GOOGLEAPIS={GOOGLEAPIS}"], folder, variables)
    return Program(["build/generate"], folder, variables)


def go(scratch: Path) -> Program:
    """In a copy: `go` writes the sums of what it has fetched beside go.mod."""
    _commands("go", "buf")
    folder, generators = scratch / "clients/go", scratch / "go-generators"
    shutil.copytree(CLIENTS / "go", folder, ignore=shutil.ignore_patterns("stubs", "build"))
    shutil.copytree(ROOT / "protos", scratch / "protos")
    path = os.pathsep.join([str(generators), _environment({})["PATH"]])
    variables = {"GOBIN": str(generators), "GOFLAGS": "-mod=mod", "PATH": path}
    for fetch in (*(["go", "install", generator] for generator in GO_GENERATORS), ["go", "mod", "download"]):
        if (fetched := _run(fetch, folder, variables)).returncode != 0:
            last = (fetched.stderr.strip() or "it said nothing").splitlines()[-1]
            raise MissingToolchainError(f"`{' '.join(fetch)}` can't fetch what it needs: {last}")
    _built(["buf", "generate"], folder, variables)
    _built(["go", "vet", "./..."], folder, variables)
    _built(["go", "build", "-o", "build/generate", "."], folder, variables)
    return Program(["build/generate"], folder)


# By the example's name: its language, and how it is made.
EXAMPLES: Final[Mapping[str, tuple[str, Callable[[Path], Program]]]] = {
    "python": ("python", python),
    "python-asyncio": ("python", asyncio),
    "node": ("node", node),
    "cpp": ("cpp", cpp),
    "java": ("java", java),
    "go": ("go", go),
}


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """With the programs of the virtual environment, and without what would lead a Python to other modules."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)])
    return {**kept, "PATH": path, **variables}


def _debian_variables() -> dict[str, str]:
    """What leads compilers, generators and programs to Debian's packages, where they are unpacked."""
    libraries = next(iter((DEBIAN / "usr/lib").glob("*-linux-gnu*")), None)
    if libraries is None:
        return {}
    return {
        "PATH": os.pathsep.join([str(DEBIAN / "usr/bin"), _environment({})["PATH"]]),
        "LD_LIBRARY_PATH": f"{libraries}:{libraries / 'jni'}",  # the second for Java, which has TLS from there
        "PKG_CONFIG_PATH": str(libraries / "pkgconfig"),
        "PKG_CONFIG_SYSROOT_DIR": str(DEBIAN),
    }


def _commands(*names: str) -> None:
    path = _environment({})["PATH"]
    absent = [name for name in names if shutil.which(name, path=path) is None]
    if absent:
        raise MissingToolchainError(f"there is no command {' and no command '.join(absent)}")


def _run(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    environment = _environment(variables)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False
    )


def _built(command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> None:
    done = _run(command, folder, variables or {})
    assert done.returncode == 0, f"{' '.join(command)} in {folder}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
