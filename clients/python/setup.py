"""The build of `runahead-client`: stubs generated from protos/ as the package `runahead_client.v1`, and the modules of
`runahead bench` as `runahead_client.bench`.

protoc writes imports as the folders of a .proto file are called, `from runahead.v1 import ...`. That name belongs to
the server's package, and two packages must not install the same files, so the stubs are given the client's name here.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Final

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
PROTOS: Final = ROOT / "protos"
CONTRACT: Final = PROTOS / "runahead/v1"
GENERATED: Final = HERE / "generated"

# Where a generated module, or the list of exports that the server has too, says in which package it is: in its imports,
# and in the name that its messages give as their module. Paths of methods and full names of messages stay as they are.
_PACKAGE: Final = re.compile(r"^(from |import )runahead\.v1\b|(')runahead\.v1(?=\.\w+_pb2')", re.MULTILINE)

# Of `runahead bench`: they import one another, the stubs, gRPC and the standard library.
BENCH: Final = (
    *(f"service/commands/bench/{name}.py" for name in ("__init__", "calls", "command", "figures")),
    "service/commands/client_channel.py",
    "service/commands/ends.py",
    "service/settings/bounded_files.py",
    "service/settings/loopback.py",
)
_FROM_SERVICE: Final = re.compile(r"^from runahead\.service\.(?:commands|settings)(?:\.bench)?(?=[. ])", re.MULTILINE)


def under_the_clients_name(module: str) -> str:
    """A module's text with the client's package in place of the server's."""
    return _PACKAGE.sub(lambda found: f"{found[1] or found[2]}runahead_client.v1", module)


def generate() -> None:
    """Writes the package to generated/runahead_client.

    Raises ExecError if the contract is not there, or protoc refuses a file.
    """
    import grpc_tools
    from grpc_tools import protoc

    sources = sorted(CONTRACT.glob("*.proto"))
    if not sources:
        raise ExecError(f"{CONTRACT} has no .proto files: build runahead-client inside its repository")
    shutil.rmtree(GENERATED, ignore_errors=True)
    raw, package = GENERATED / "raw", GENERATED / "runahead_client"
    raw.mkdir(parents=True)
    (package / "v1").mkdir(parents=True)
    folders = [f"-I{PROTOS}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    outputs = [f"--python_out={raw}", f"--pyi_out={raw}", f"--grpc_python_out={raw}"]
    print(f"generating stubs of {len(sources)} proto files", file=sys.stderr)
    if protoc.main(["protoc", *folders, *outputs, *map(str, sources)]) != 0:
        raise ExecError("protoc refused a file under protos/; its message is above")
    for path in [CONTRACT / "__init__.py", *(raw / "runahead/v1").iterdir()]:
        (package / "v1" / path.name).write_text(under_the_clients_name(path.read_text(encoding="utf-8")))
    for path in sources:
        shutil.copy(path, package / "v1")
    (package / "bench").mkdir()
    for module in map(ROOT.joinpath, BENCH):
        text = _FROM_SERVICE.sub("from runahead_client.bench", module.read_text(encoding="utf-8"))
        (package / "bench" / module.name).write_text(under_the_clients_name(text), encoding="utf-8")
    (package / "__init__.py").write_text(
        '"""Stubs of runahead\'s gRPC service, a package for each of its versions, and a measurement of one."""\n'
    )
    (package / "py.typed").touch()


class BuildStubs(build_py):
    """`build_py` after the stubs are there."""

    def run(self) -> None:
        generate()
        super().run()


for name in ("v1", "bench"):  # setuptools looks for them before it builds
    (GENERATED / "runahead_client" / name).mkdir(parents=True, exist_ok=True)
setup(
    version=tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"],
    packages=["runahead_client", "runahead_client.bench", "runahead_client.v1"],
    package_dir={"": "generated"},
    package_data={"runahead_client": ["py.typed"], "runahead_client.v1": ["*.proto", "*.pyi"]},
    cmdclass={"build_py": BuildStubs},
)
