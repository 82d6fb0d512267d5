"""The build: what each folder is called when it is imported, and the Python stubs generated from protos/.

Metadata and tool settings are in pyproject.toml.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Final

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError

ROOT = Path(__file__).resolve().parent
PROTOS = ROOT / "protos"
VERSION = runpy.run_path(str(ROOT / "service/version.py"))  # by its path: at build time no package of ours is installed

# Under which name a folder is imported. src/ says the same in links, for tools that look for packages in folders and
# ask no import hook: type checkers, editors, the import checker, and trials on a copy of the tree.
IMPORT_NAMES: Final = {
    "runahead": "protos/runahead",
    "runahead.cuda_graphs": "cuda_graphs",
    "runahead.runtime": "runtime",
    "runahead.service": "service",
}

COMMIT: Final = "RUNAHEAD_COMMIT"  # variable of the build: what commit sources are of that are no checkout


def packages() -> list[str]:
    """Import names of all packages."""
    inner = (f"{name}.{found}" for name, folder in IMPORT_NAMES.items() for found in find_packages(str(ROOT / folder)))
    return [*IMPORT_NAMES, *inner]


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

    A wheel is told its commit, which is the checkout's or else what a variable says. An editable install is a checkout,
    which is asked for its commit instead.
    """

    def run(self) -> None:
        generate_stubs()
        super().run()
        if not self.editable_mode:
            VERSION["write_commit"](ROOT, Path(self.build_lib) / "runahead/service", os.environ.get(COMMIT, ""))


setup(
    packages=packages(),
    package_dir=IMPORT_NAMES,
    package_data={
        "runahead": ["py.typed"],
        "runahead.v1": ["*.proto", "*.pyi"],
        "runahead.runtime.kernels.triton.attention": ["measured_*.json"],
        "runahead.runtime.kernels.triton.gemm": ["measured_*.json"],
        "runahead.runtime.process": ["measured_*.json"],
        "runahead.runtime.models": ["bundled/*", "bundled/draft_head/*", "bundled/hybrid/*"],
    },
    cmdclass={"build_py": BuildWithStubs},
)
