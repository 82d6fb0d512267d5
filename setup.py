"""The build: packages, and the Python stubs generated from protos/ before any of them is collected.

Metadata and tool settings are in pyproject.toml.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError

ROOT = Path(__file__).resolve().parent
PROTOS = ROOT / "protos"
VERSION = runpy.run_path(str(ROOT / "service/version.py"))  # by its path: at build time no package of ours is installed


def generate_stubs() -> None:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py beside every .proto under protos/.

    Raises ExecError where protoc refuses a file.
    """
    import grpc_tools
    from grpc_tools import protoc

    sources = sorted(str(path) for path in PROTOS.rglob("*.proto"))
    arguments = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
        f"--python_out={PROTOS}",
        f"--pyi_out={PROTOS}",
        f"--grpc_python_out={PROTOS}",
        *sources,
    ]
    print(f"generating stubs of {len(sources)} proto files", file=sys.stderr)
    if protoc.main(arguments) != 0:
        raise ExecError("protoc refused a file under protos/; its message is above")


class BuildWithStubs(build_py):
    """`build_py` after the stubs are there: for wheels and for editable installs alike.

    A wheel is told its commit. An editable install is a checkout, which is asked for its commit instead.
    """

    def run(self) -> None:
        generate_stubs()
        super().run()
        if not self.editable_mode:
            VERSION["write_commit"](ROOT, Path(self.build_lib) / "service")


setup(
    packages=[
        *find_packages(str(ROOT), include=["cuda_graphs*", "runtime*", "service*"]),
        "runahead",
        "runahead.v1",
    ],
    package_dir={"runahead": "protos/runahead"},
    package_data={
        "runahead": ["py.typed"],
        "runahead.v1": ["*.proto", "*.pyi"],
        "runtime.models": ["bundled/*"],
    },
    cmdclass={"build_py": BuildWithStubs},
)
