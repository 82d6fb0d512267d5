"""A Python environment with `runahead-client`, what it needs, and nothing else: no server and no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

from tests.project.repository import ROOT

# `runahead-client[status]`, as clients/python/pyproject.toml has it, and what these need in turn.
NEEDED: Final = ("googleapis-common-protos", "grpcio", "grpcio-status", "protobuf", "typing_extensions")


@cache
def client_wheel(scratch: Path) -> Path:
    """Built of a copy of the client's sources and the contract. Nothing is fetched."""
    sources, wheels = scratch / "sources", scratch / "wheels"
    shutil.copytree(ROOT / "clients/python", sources / "clients/python", ignore=shutil.ignore_patterns("generated"))
    shutil.copytree(ROOT / "protos", sources / "protos", ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
    shutil.copytree(ROOT / "service", sources / "service", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", sources)
    # Without isolation: what the build needs is among the requirements of the tests.
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    _done([*command, "--wheel-dir", str(wheels), str(sources / "clients/python")])
    shutil.rmtree(sources)
    (built,) = wheels.glob("*.whl")
    return built


@cache
def clean_environment(scratch: Path) -> Path:
    """The environment's Python. Of this environment it has links to the files of what is needed, and no other."""
    place = scratch / "environment"
    venv.create(place)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    for name in NEEDED:
        for file in metadata.files(name) or ():
            if ".." not in file.parts:  # a script of another folder
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                (packages / file).symlink_to(file.locate())
    python = place / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    _done([*install, str(client_wheel(scratch))])
    return python


def _done(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
