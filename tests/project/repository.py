"""The repository's own sources, as the rules about them see them.

Folders and entry points are named here and nowhere else.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("cuda_graphs", "protos/runahead", "runtime", "service")  # what is installed
TOOLS: Final = ("benchmarks",)
TESTS: Final = ("tests",)
KERNELS: Final = ("runtime/kernels/triton",)  # a kernel is one function, however long
ENTRY_POINTS: Final = (
    "service/main.py",  # the command `runahead`
    "protos/runahead/__main__.py",  # python -m runahead
    "service/chat/template_process.py",  # a front end, and a chat's client, start it by its name
    "service/structures/compile_process.py",  # a front end starts it by its name
    "runtime/masks/worker.py",  # an engine starts it by its name
    "runtime/models/__main__.py",  # `runahead models` starts it by its name
    "runtime/process/main.py",  # the supervisor starts it by its name
    "runtime/process/rank.py",  # an engine starts it by its name
    "service/servers/serve_front_end.py",  # and this one
    "service/servers/side_server.py",  # and this one
    "runtime/process/tune.py",  # runahead tune starts it by its name
    "benchmarks/bench.py",  # make bench, which measures the host on a device of its own
)

_GENERATED: Final = re.compile(r"_pb2(_grpc)?\.pyi?$")


def sources(*folders: str) -> Iterator[Path]:
    """Python files of ours below some folders, in order."""
    for folder in folders:
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if not _GENERATED.search(path.name))


def name_of(path: Path) -> str:
    """A file's path inside the repository."""
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def documents() -> Iterator[Path]:
    """What people read about the project."""
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def module_of(path: Path) -> str:
    """The name by which a file is imported."""
    name = name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    if path.is_relative_to(ROOT / "protos"):
        return name.removeprefix("protos.")
    return f"runahead.{name}" if name.partition(".")[0] in PACKAGES else name


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call))


def names_used(path: Path) -> set[str]:
    """Imported modules, and attributes as `module.name`."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return found
